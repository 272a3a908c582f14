"""AdamW (Loshchilov and Hutter, https://arxiv.org/abs/1711.05101), with torch's fused kernel over
all local parts."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshtrain.mesh import Mesh
from meshtrain.optim.grad_norm import scale_gradients
from meshtrain.optim.optimizer import ParamGroup, UpdateRule
from meshtrain.optim.rounding import blocks, random_bits, round_stochastically
from meshtrain.parallel.sharding import ParameterSpec

if TYPE_CHECKING:
    from meshtrain.config import Optimizer as OptimizerConfig


class AdamW(UpdateRule):
    title, states = "AdamW", ("exp_avg", "exp_avg_sq")

    def __init__(self, groups: Sequence[ParamGroup], config: "OptimizerConfig", mesh: Mesh) -> None:
        super().__init__(groups, config, mesh)
        # A shard of a small parameter may be empty, and a stage of a pipeline may have nothing to
        # train.
        self._filled = [
            (group, [p for p in group.parameters if p.local.numel() > 0]) for group in groups
        ]
        self._parameters = [p for _, filled in self._filled for p in filled]
        params = [
            {"params": [p.local for p in filled], "weight_decay": group.options.weight_decay}
            for group, filled in self._filled
        ]
        keys: dict[str, Any] = {
            "lr": config.lr,
            "betas": config.betas,
            "eps": config.eps,
            "fused": True,
        }
        # The kernel takes its factor in float32, which is not precise enough for other gradients.
        self._scales = all(p.local.dtype == torch.float32 for p in self._parameters)
        self._adamw = torch.optim.AdamW(params or [{"params": []}], **keys)
        for p in self._parameters:
            step = torch.zeros((), dtype=torch.float32, device=p.local.device)
            self._adamw.state[p.local] = {"step": step, **p.state}

    @classmethod
    def update_bytes(cls, parameter: ParameterSpec, config: "OptimizerConfig", size: int) -> int:
        # The kernel reads parameter, gradient and both moments, and writes all but the gradient.
        tensors = 4 + 3
        if config.clip_norm is not None:
            # It writes a scaled gradient too; in float64 `scale_gradients` does, and reads it.
            tensors += 1 if size == 4 else 2
        return tensors * size * math.prod(parameter.shape)

    def update(self, skip: Tensor, factor: Tensor | None) -> None:
        # The kernel itself divides gradients and skips, as for torch's GradScaler: clipping needs
        # no separate pass.
        if not self._scales:
            scale_gradients(self._parameters, factor)
            factor = None
        self._adamw.grad_scale = None if factor is None else (1 / factor).float()  # type: ignore[attr-defined]
        self._adamw.found_inf = skip  # type: ignore[attr-defined]
        for (group, _), own in zip(self._filled, self._adamw.param_groups, strict=False):
            own["lr"] = group.lr
        self._adamw.step()

    def set_updates(self, updates: Tensor) -> None:
        for state in self._adamw.state.values():
            state["step"].copy_(updates)


class RoundedAdamW(UpdateRule):
    """AdamW in torch's order of operations and the weights' dtype; moments are rounded
    stochastically to bfloat16."""

    title, states = "AdamW in bfloat16", AdamW.states

    def __init__(self, groups: Sequence[ParamGroup], config: "OptimizerConfig", mesh: Mesh) -> None:
        super().__init__(groups, config, mesh)
        self._betas, self._eps = config.betas, config.eps
        self._parameters = [
            (group, p) for group in groups for p in group.parameters if p.local.numel() > 0
        ]
        self._updates: Tensor | float = 0.0  # number of updates made

    @classmethod
    def state_specs(cls, parameter: ParameterSpec) -> dict[str, ParameterSpec]:
        return super().state_specs(replace(parameter, dtype=torch.bfloat16))

    @classmethod
    def update_bytes(cls, parameter: ParameterSpec, config: "OptimizerConfig", size: int) -> int:
        # The sum over the operators of `update`, which are not fused.
        tensors = 40 if config.clip_norm is not None else 38  # in the dtype of the weights
        rounding = 364  # bytes per element: two moments in bfloat16, and random bits in int64
        return (tensors * size + rounding) * math.prod(parameter.shape)

    @torch.no_grad()
    def update(self, skip: Tensor, factor: Tensor | None) -> None:
        update = (self._updates + torch.ones_like(skip)).double()
        corrections = [1 - beta**update for beta in self._betas]
        for group, p in self._parameters:
            rate, decay = group.lr / corrections[0], 1 - group.lr * group.options.weight_decay
            assert p.local.grad is not None  # `squared_norm` has taken the gradient
            states = p.state["exp_avg"], p.state["exp_avg_sq"]
            whole = [torch.atleast_1d(x.detach()) for x in (p.local, p.local.grad, *states)]
            first, *others = p.part
            for rows in blocks(whole[0].shape):
                value, grad, *averages = (x[rows] for x in whole)
                grad = grad if factor is None else grad * factor
                exp_avg, exp_avg_sq = (x.to(value.dtype) for x in averages)
                exp_avg.lerp_(grad, 1 - self._betas[0])
                exp_avg_sq.mul_(self._betas[1]).addcmul_(grad, grad, value=1 - self._betas[1])
                denominator = (exp_avg_sq / corrections[1]).sqrt_().add_(self._eps)
                part = slice(first.start + rows.start, first.start + rows.stop), *others
                bits = random_bits(p.spec.name, update, p.spec.dims, part)
                rounded = (
                    round_stochastically(exp_avg, bits),
                    round_stochastically(exp_avg_sq, bits >> 16),
                )
                changed = value * decay - rate * (exp_avg / denominator)
                for old, new in zip((value, *averages), (changed, *rounded), strict=True):
                    old.copy_(torch.where(skip.bool(), old, new))
        self._updates = self._updates + 1 - skip

    def set_updates(self, updates: Tensor) -> None:
        self._updates = updates.clone()
