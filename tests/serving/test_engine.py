import json
import os
from pathlib import Path

from strop.serving.disaggregation import Link
from strop.serving.engine import cores_of_replica, engine_command, engine_environment
from strop.serving.stack import Artifact, Disaggregation, Speculator, Stack, Topology


def test_the_command_line_says_what_the_stack_says(tiny_model: Path) -> None:
    args = {"max-model-len": 512, "enforce-eager": True, "disable-log-stats": False, "seed": None}
    stack = Stack.build(tiny_model, "tiny", "float32", args)
    command = engine_command(stack, "127.0.0.1", 9000)
    assert command[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert command[command.index("--max-model-len") + 1] == "512"
    assert command[command.index("--dtype") + 1] == "float32"
    assert "--enforce-eager" in command
    assert "--disable-log-stats" not in command and "--seed" not in command
    assert "--speculative-config" not in command
    assert command[command.index("--middleware") + 1] == "strop.serving.capture.Capture"
    assert "--middleware" not in engine_command(stack, "127.0.0.1", 9000, capture=False)


def test_a_speculator_becomes_vllms_configuration(tiny_model: Path) -> None:
    stack = Stack.build(tiny_model, "tiny")
    drafter = Speculator(method="eagle3", draft_tokens=3, weights=Artifact.of(tiny_model))
    command = engine_command(stack.model_copy(update={"speculator": drafter}), "127.0.0.1", 9000)
    configuration = json.loads(command[command.index("--speculative-config") + 1])
    assert configuration == {"method": "eagle3", "num_speculative_tokens": 3, "model": str(tiny_model)}


def test_replicas_share_the_cores_without_overlap() -> None:
    cores = sorted(os.sched_getaffinity(0))
    assert cores_of_replica(0, 1) == cores
    for replicas in range(1, len(cores) + 1):
        shares = [cores_of_replica(i, replicas) for i in range(replicas)]
        assert sorted(c for share in shares for c in share) == cores
    assert cores_of_replica(len(cores), len(cores) + 1) == [cores[0]]


def test_capture_is_configured_by_environment(tiny_model: Path) -> None:
    stack = Stack.build(tiny_model, "tiny")
    environment = engine_environment(stack, 1, [0], {"root": "/x", "stack": stack.fingerprint})
    assert json.loads(environment["STROP_CAPTURE"])["stack"] == stack.fingerprint
    assert "STROP_CAPTURE" not in engine_environment(stack, 1, [0], None)


def test_replicas_with_a_division_of_labour_are_linked(tiny_model: Path) -> None:
    topology = Topology(disaggregation=Disaggregation(min_request_bytes=77))
    stack = Stack.build(tiny_model, "tiny", topology=topology)
    answers, computes = (Link(role, "http://r:1", 5555) for role in ("decode", "prefill"))
    command = engine_command(stack, "127.0.0.1", 9000, link=answers)
    middlewares = [command[i + 1] for i, word in enumerate(command) if word == "--middleware"]
    # Capture is the outer one: the time that the prompt takes elsewhere is in its records.
    assert middlewares == ["strop.serving.prefill.Prefill", "strop.serving.capture.Capture"]
    how = json.loads(command[command.index("--kv-transfer-config") + 1])
    assert (how["kv_connector"], how["kv_role"]) == ("LMCacheMPConnector", "kv_consumer")
    assert how["kv_load_failure_policy"] == "recompute"
    assert how["kv_connector_extra_config"]["lmcache.mp.port"] == 5555
    environment = engine_environment(stack, 1, [0], None, answers)
    assert json.loads(environment["STROP_PREFILL"]) == {
        "url": "http://r:1", "min_request_bytes": 77, "transfer": "lmcache"
    }  # fmt: skip

    command = engine_command(stack, "127.0.0.1", 9000, capture=False, link=computes)
    assert "--middleware" not in command
    assert json.loads(command[command.index("--kv-transfer-config") + 1])["kv_role"] == "kv_both"
    assert "STROP_PREFILL" not in engine_environment(stack, 1, [0], None, computes)

    command = engine_command(stack, "127.0.0.1", 9000, link=Link("decode", "http://r:1", None))
    assert json.loads(command[command.index("--kv-transfer-config") + 1])["kv_connector"] == "NixlConnector"
