"""The optimiser of the draft: Muon for its matrices, AdamW for its head and norms."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


class DraftOptimiser(torch.optim.Optimizer):
    """Muon (Jordan et al., 2024; update scaled to AdamW's size as in Liu et al., arXiv 2502.16982) where
    a group says `muon`, AdamW elsewhere. `dtype` is what the orthogonalisation computes in.
    """

    def __init__(self, groups: Iterable[dict[str, object]], dtype: torch.dtype):
        defaults = {
            "muon": False,
            "lr": 0.0,
            "momentum": 0.95,
            "betas": (0.9, 0.95),
            "eps": 1e-8,
            "weight_decay": 0.01,
        }
        super().__init__(list(groups), defaults)
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            update = self._muon if group["muon"] else self._adam
            for parameter in group["params"]:
                if parameter.grad is not None:
                    change = update(self.state[parameter], parameter.grad, group)
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(change, alpha=group["lr"])

    def _muon(self, state: dict[str, Tensor], gradient: Tensor, group: dict[str, Any]) -> Tensor:
        average = state.setdefault("average", torch.zeros_like(gradient))
        average.lerp_(gradient, 1 - group["momentum"])
        update = orthogonalised(torch.lerp(gradient, average, group["momentum"]), self.dtype)
        return update * (0.2 * max(gradient.shape) ** 0.5)

    def _adam(self, state: dict[str, Tensor], gradient: Tensor, group: dict[str, Any]) -> Tensor:
        beta1, beta2 = group["betas"]
        average = state.setdefault("average", torch.zeros_like(gradient))
        square = state.setdefault("square", torch.zeros_like(gradient))
        count = state.setdefault("count", torch.zeros(()))
        count += 1
        average.lerp_(gradient, 1 - beta1)
        square.lerp_(gradient.square(), 1 - beta2)
        size = (square / (1 - beta2 ** int(count))).sqrt_().add_(group["eps"])
        return average / (1 - beta1 ** int(count)) / size


def orthogonalised(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest semi-orthogonal matrix, roughly: singular values between 0.7 and 1.2, by five
    Newton-Schulz iterations of a quintic."""
    a, b, c = _NEWTON_SCHULZ
    wide = matrix.shape[0] <= matrix.shape[1]
    x = (matrix if wide else matrix.T).to(dtype)
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x if wide else x.T).to(matrix.dtype)


def optimiser_for(draft: torch.nn.Module, learning_rate: float, dtype: torch.dtype) -> DraftOptimiser:
    """Matrices at `learning_rate` by Muon, norms at a third and the head at a sixth of it by AdamW."""
    named = dict(draft.named_parameters())
    head = named.pop("lm_head.weight")
    matrices = [p for p in named.values() if p.ndim == 2]
    norms = [p for p in named.values() if p.ndim < 2]
    groups = [
        {"params": matrices, "muon": True, "base": learning_rate},
        {"params": norms, "base": 0.3 * learning_rate},
        {"params": [head], "base": 0.15 * learning_rate},
    ]
    return DraftOptimiser(groups, dtype)
