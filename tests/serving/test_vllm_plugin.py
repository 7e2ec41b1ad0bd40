from importlib.metadata import entry_points

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strop.serving.vllm_plugin import SPIN_S, expand_batch_to_tokens, register


def test_the_plugin_is_announced_to_vllm() -> None:
    (plugin,) = entry_points(group="vllm.general_plugins", name="strop")
    assert callable(plugin.load())


def test_mending_twice_does_no_harm() -> None:
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    if not current_platform.is_cpu():
        pytest.skip("what is mended is vLLM on CPUs")
    register()
    register()
    assert SpinCondition.__init__.__defaults__ == (SPIN_S,)
    assert rejection_sampler.expand_batch_to_tokens is expand_batch_to_tokens


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 4)), min_size=1, max_size=8))
def test_every_draft_token_gets_its_requests_value(requests: list[tuple[float, int]]) -> None:
    values = torch.tensor([value for value, _ in requests])
    counts = torch.tensor([count for _, count in requests])
    expanded = expand_batch_to_tokens(
        values, counts.cumsum(0), int(counts.sum()), replace_from=0, replace_to=1
    )
    assert expanded.tolist() == [value or 1.0 for value, count in requests for _ in range(count)]
    assert expanded.dtype == values.dtype


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_dtypes_are_kept(dtype: torch.dtype) -> None:
    expanded = expand_batch_to_tokens(
        torch.tensor([3, 5], dtype=dtype), torch.tensor([2, 3], dtype=torch.int32), 3
    )
    assert (expanded.dtype, expanded.tolist()) == (dtype, [3, 3, 5])
