"""Muon (Jordan et al., 2024): momentum whose update is made orthogonal, for weight matrices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor


def orthogonal(g: Tensor, n_steps: int = 5) -> Tensor:
    """The nearest semi-orthogonal matrices to g [batch, rows, cols], roughly: Newton-Schulz in
    bf16 with the quintic coefficients of the paper, singular values land in about 0.7..1.2."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(n_steps):
        s = x @ x.mT
        x = a * x + (b * s + c * s @ s) @ x
    result: Tensor = (x.mT if tall else x).to(g.dtype)
    return result


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, then `orthogonal`; matrices of one shape go through it together."""

    def __init__(self, params: Iterable[Tensor], lr: float = 0.02, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            alike: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    alike[p.shape].append(p)
            for shape, params in alike.items():
                update = orthogonal(torch.stack([self._momentum(p, group) for p in params]))
                scale = -group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for p, u in zip(params, update, strict=True):
                    p.add_(u, alpha=scale)

    def _momentum(self, p: Tensor, group: dict[str, float]) -> Tensor:
        assert p.grad is not None
        state = self.state[p]
        if not state:
            state["momentum"] = torch.zeros_like(p)
        buffer = state["momentum"].lerp_(p.grad, 1 - group["momentum"])
        return p.grad.lerp(buffer, group["momentum"])
