from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from strop.pipelines.settings import ConfigError, Settings, describe, load_settings


def _load(tmp_path: Path, text: str | bytes) -> Settings:
    path = tmp_path / "strop.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_settings(path)


def test_described_defaults_are_the_defaults(tmp_path: Path) -> None:
    settings = _load(tmp_path, describe())
    assert settings.model_copy(update={"model": "model"}) == Settings()


def test_every_key_is_documented() -> None:
    lines = describe().splitlines()
    keys = [
        i
        for i, line in enumerate(lines)
        if line.strip() and ":" in line and not line.lstrip().startswith("#")
    ]
    documented = [i for i in keys if lines[i - 1].lstrip().startswith("#")]
    # Entries of a mapping value (engine_args) have no documentation of their own.
    assert {lines[i].strip().split(":")[0] for i in keys if i not in documented} <= {
        "max-model-len", "max-num-seqs", "enforce-eager", "enable-auto-tool-choice", "tool-call-parser",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: [", "line 1"),
        ("modell: x", "modell is not a known key"),
        ("serving: {prot: 1}", "serving.prot is not a known key"),
        ("serving: {port: 70000}", "serving.port"),
        ("- a\n- b", "keys and values"),
        (b"model: \xff\xfe", "not UTF-8"),
        ("loop: {heldout_share: 2}", "loop.heldout_share"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _load(tmp_path, text)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_settings(tmp_path / "none.yaml")


def test_a_relative_model_is_relative_to_the_file(tmp_path: Path) -> None:
    assert _load(tmp_path, "model: weights").model_path == tmp_path / "weights"


@given(st.binary(max_size=200))
def test_no_bytes_do_more_than_raise_a_config_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.mktemp("c") / "strop.yaml"
    path.write_bytes(data)
    try:
        assert isinstance(load_settings(path), Settings)
    except ConfigError:
        pass


def test_yaml_cannot_make_objects(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        _load(tmp_path, yaml.dump({"model": Path("x")}))


def test_relative_keys_and_certificate_are_relative_to_the_file(tmp_path: Path) -> None:
    settings = _load(tmp_path, "serving: {gateway: {keys_file: k/keys, tls_certificate: /abs/both.pem}}")
    assert settings.serving.gateway.keys_file == str(tmp_path / "k" / "keys")
    assert settings.serving.gateway.tls_certificate == "/abs/both.pem"
