import json
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from strop.pipelines.commands.stack import app
from strop.serving import stack as stack_module
from strop.serving.hardware import Hardware
from strop.serving.stack import (
    Artifact,
    Disaggregation,
    Engine,
    Speculator,
    Stack,
    StackError,
    Topology,
    canonical_json,
    file_sha256,
)

CPU = Hardware(device="cpu", name="A CPU", isa="avx2")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that looks like a model; nothing loads it."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}')
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def stack_of(model: Path, **changes: object) -> Stack:
    engine = Engine(version="vllm 0.32.0", dtype="bfloat16", args={"max-model-len": 4096})
    return Stack(served_model="m", model=Artifact.of(model), engine=engine, hardware=CPU).model_copy(
        update=changes
    )


def test_fingerprint_does_not_depend_on_where_the_files_lie(model, tmp_path):
    moved = shutil.copytree(model, tmp_path / "elsewhere")
    assert stack_of(model).fingerprint == stack_of(moved).fingerprint
    assert stack_of(model).diff(stack_of(moved)) == {}


def test_a_tokenizer_changes_the_fingerprint_but_not_the_logits(model):
    before = stack_of(model)
    (model / "tokenizer.json").write_text('{"changed": true}')
    after = stack_of(model)
    assert before.fingerprint != after.fingerprint
    assert (before.numerics, before.kv_identity) == (after.numerics, after.kv_identity)


def test_weights_bytes_change_every_identity(model):
    before = stack_of(model)
    (model / "model.safetensors").write_bytes(b"weighty")
    after = stack_of(model)
    assert before.fingerprint != after.fingerprint
    assert before.numerics != after.numerics
    assert before.kv_identity != after.kv_identity
    assert list(before.diff(after)) == ["model.files.model.safetensors"]


def test_speculation_and_replicas_leave_the_logits_alone(model):
    plain = stack_of(model)
    faster = stack_of(
        model, speculator=Speculator(method="ngram", draft_tokens=3), topology=Topology(replicas=2)
    )
    assert plain.fingerprint != faster.fingerprint
    assert (plain.numerics, plain.kv_identity) == (faster.numerics, faster.kv_identity)


@pytest.mark.parametrize(
    "changes",
    [
        {"quantization": "compressed-tensors"},
        {"engine": Engine(version="vllm 0.32.0", dtype="float32", args={"max-model-len": 4096})},
        {"engine": Engine(version="vllm 0.33.0", dtype="bfloat16", args={"max-model-len": 4096})},
        {
            "engine": Engine(
                version="vllm 0.32.0", dtype="bfloat16", args={"max-model-len": 4096, "rope": "x"}
            )
        },
    ],
)
def test_what_changes_logits_changes_numerics_and_kv(model, changes):
    plain, changed = stack_of(model), stack_of(model, **changes)
    assert plain.numerics != changed.numerics
    assert plain.kv_identity != changed.kv_identity


def test_disaggregation_is_a_topology_of_its_own_and_leaves_the_logits_alone(model):
    plain = stack_of(model)
    apart = stack_of(model, topology=Topology(disaggregation=Disaggregation()))
    assert plain.fingerprint != apart.fingerprint
    assert (plain.numerics, plain.kv_identity) == (apart.numerics, apart.kv_identity)
    assert Stack.from_json(apart.to_json()) == apart
    # Manifests that were written before there was any are still what they say.
    assert '"disaggregation"' not in plain.to_json()


def test_nixl_is_refused_where_it_is_not_installed(model):
    with pytest.raises(StackError, match="nixl"):
        stack_of(model, topology=Topology(disaggregation=Disaggregation(transfer="nixl"))).verify()


def test_kv_codec_changes_stored_blocks_only(model):
    plain, coded = stack_of(model), stack_of(model, kv_codec="int8")
    assert plain.numerics == coded.numerics
    assert plain.kv_identity != coded.kv_identity


def test_engine_arguments_that_only_move_work_do_not_count(model):
    engine = Engine(version="vllm 0.32.0", dtype="bfloat16", args={"max-model-len": 4096, "max-num-seqs": 64})
    assert stack_of(model).numerics == stack_of(model, engine=engine).numerics


def test_verify_names_the_changed_file(model):
    stack = stack_of(model)
    stack.verify()
    (model / "model.safetensors").write_bytes(b"weighty")
    with pytest.raises(StackError, match=r"model\.safetensors changed"):
        stack.verify()


def test_load_refuses_a_missing_file(model, tmp_path):
    path = tmp_path / "stack.json"
    stack_of(model).save(path)
    assert Stack.load(path) == stack_of(model)
    (model / "tokenizer.json").unlink()
    with pytest.raises(StackError, match=r"tokenizer\.json is missing"):
        Stack.load(path)


def test_edited_manifest_is_refused(model, tmp_path):
    content = json.loads(stack_of(model).to_json())
    content["engine"]["dtype"] = "float32"
    with pytest.raises(StackError, match="edited"):
        Stack.from_json(json.dumps(content))


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "3", '"x"', '{"fingerprint": "ab"}', "{", '{"unknown": 1}']
)
def test_what_is_not_a_manifest_is_refused(text):
    with pytest.raises(StackError, match="is not a Stack"):
        Stack.from_json(text)


def test_lists_missing_shards(model):
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(StackError, match=r"1 of 2 shards: model-00001-of-00002\.safetensors"):
        Artifact.of(model)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "x.pt", "deep/er.pkl"])
def test_pickles_are_refused(model, name):
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).write_bytes(b"")
    with pytest.raises(StackError, match="is a pickle"):
        Artifact.of(model)


def test_folders_that_are_no_models_are_refused(model, tmp_path):
    with pytest.raises(StackError, match="is not a folder"):
        Artifact.of(tmp_path / "absent")
    (model / "model.safetensors").unlink()
    with pytest.raises(StackError, match="holds no"):
        Artifact.of(model)
    (model / "config.json").unlink()
    with pytest.raises(StackError, match=r"no config\.json"):
        Artifact.of(model)


def test_digests_of_large_files_are_remembered_until_the_file_changes(tmp_path, strop_home, monkeypatch):
    path = tmp_path / "large"
    path.write_bytes(b"a" * (stack_module._REMEMBER_FROM_BYTES + 1))
    first = file_sha256(path)
    (remembered,) = (strop_home / "cache" / "digests").iterdir()
    remembered.write_text("from the cache")
    assert file_sha256(path) == "from the cache"
    os.utime(path, ns=(1, 1))
    assert file_sha256(path) == first


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.text()
        | st.floats(allow_nan=False, allow_infinity=False),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=20,
    )
)
def test_canonical_json_is_one_text_for_one_value(value):
    try:
        text = canonical_json(value)
    except UnicodeEncodeError:
        return  # lone surrogates have no UTF-8, hence no canonical form
    assert json.loads(text) == value
    assert canonical_json(json.loads(text)) == text
    if isinstance(value, dict):
        assert canonical_json(dict(reversed(value.items()))) == text


names = st.text(st.characters(codec="utf-8"), max_size=20)


@given(
    served_model=names,
    args=st.dictionaries(names, st.none() | st.booleans() | st.integers() | names, max_size=4),
    files=st.dictionaries(names, st.from_regex(r"[0-9a-f]{64}", fullmatch=True), max_size=4),
    draft_tokens=st.integers(1, 16),
)
def test_manifest_round_trip(served_model, args, files, draft_tokens):
    stack = Stack(
        served_model=served_model,
        model=Artifact(location="/m", files=files),
        engine=Engine(version="v", dtype="float32", args=args),
        hardware=CPU,
        speculator=Speculator(method="ngram", draft_tokens=draft_tokens),
    )
    again = Stack.from_json(stack.to_json())
    assert again == stack
    assert again.fingerprint == stack.fingerprint


def test_tiny_model_is_a_plain_stack(tiny_model):
    stack = Stack.build(tiny_model, "tiny")
    assert stack.fingerprint == Stack.build(tiny_model, "tiny").fingerprint
    assert stack.hardware.device in ("cpu", "cuda")
    assert stack.engine.dtype in ("bfloat16", "float32")


def run(*arguments: object, stdin: str | None = None):
    return CliRunner().invoke(app, [str(a) for a in arguments], input=stdin)


def test_command_shows_compares_and_verifies(model, tmp_path):
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    stack_of(model).save(first)
    stack_of(model, quantization="gguf").save(second)
    shown = json.loads(run("show", first, "--json").stdout)
    assert shown["fingerprint"] == stack_of(model).fingerprint
    assert stack_of(model).fingerprint in run("show", "-", stdin=first.read_text()).stdout
    assert run("show", model).exit_code == 0
    compared = json.loads(run("diff", first, second, "--json").stdout)
    assert compared == {
        "differences": {"quantization": [None, "gguf"]},
        "same_numerics": False,
        "same_kv": False,
    }
    assert "may differ" in run("diff", first, second).stdout
    assert "same Stack" in run("diff", first, first).stdout
    assert run("verify", first).exit_code == 0
    (model / "model.safetensors").write_bytes(b"weighty")
    changed = run("verify", first)
    assert changed.exit_code == 2
    assert "model.safetensors changed" in changed.output.replace("\n", "")


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"{}", b"nonsense"])
def test_command_refuses_what_is_no_stack(tmp_path, content):
    path = tmp_path / "x.json"
    if content is not None:
        path.write_bytes(content)
    result = run("show", path)
    assert result.exit_code == 2
    assert "x.json" in result.output.replace("\n", "")
    assert "Traceback" not in result.output
