"""What strop mends inside vLLM, by its plugin entry point `vllm.general_plugins`.

Loaded in every process of every replica, several times over: each mend must be harmless twice.
"""

import torch

SPIN_S = 0.005


def register() -> None:
    """Entry point."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
        from vllm.v1.sample import rejection_sampler

        # A worker that waits for its next step spins for a second: on the cores of another replica or
        # of the other Stack of a rollout, whose threads then wait for each other at every operator.
        SpinCondition.__init__.__defaults__ = (SPIN_S,)
        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens  # type: ignore[assignment]


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Repeat each request's value [batch] for each of its draft tokens [tokens], with one value replaced.

    vLLM 0.32 on CPUs hands its operator a converted copy of the output and throws the result away, so
    that speculating requests with a temperature, top-k or top-p were sampled with whatever lay in
    memory: their answers were noise.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    replaced = torch.where(x == replace_from, torch.as_tensor(replace_to, dtype=x.dtype), x)
    return replaced.repeat_interleave(counts, output_size=num_tokens)
