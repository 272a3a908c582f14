"""AdamW (Loshchilov and Hutter, https://arxiv.org/abs/1711.05101), with torch's fused kernel over
all local parts."""

import math
from collections import ChainMap
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from meshtrain.mesh import Mesh
from meshtrain.optim.grad_norm import LocalParameter, scale_gradients
from meshtrain.optim.optimizer import ParamGroup, UpdateRule
from meshtrain.optim.rounding import blocks, random_bits, round_stochastically
from meshtrain.parallel.sharding import ParameterSpec

if TYPE_CHECKING:
    from meshtrain.config.schema import OptimizerSection


class AdamW(UpdateRule):
    title = "AdamW"
    states = ("exp_avg", "exp_avg_sq")

    def __init__(
        self, groups: Sequence[ParamGroup], config: "OptimizerSection", mesh: Mesh
    ) -> None:
        super().__init__(groups, config, mesh)
        # A shard of a small parameter may be empty.
        self._parameters = [p for p in self.group_of if p.local.numel() > 0]
        torch_groups: list[dict[str, Any]] = [
            {"params": [], "weight_decay": group.options.weight_decay} for group in groups
        ]
        if not torch_groups:  # a stage of a pipeline may have nothing to train
            torch_groups = [{"params": []}]
        self._adamw = torch.optim.AdamW(
            torch_groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True
        )
        self._torch_groups: dict[LocalParameter, dict[str, Any]] = {}
        for group, torch_group in zip(groups, self._adamw.param_groups, strict=False):
            self._torch_groups |= dict.fromkeys(group.parameters, torch_group)
        for p in self._parameters:
            step = torch.zeros((), dtype=torch.float32, device=p.local.device)
            # torch finds the averages where they are at the time.
            self._adamw.state[p.local] = ChainMap({"step": step}, p.state)
        # The kernel takes its factor in float32, which is not precise enough for other gradients.
        self._kernel_scales = all(p.local.dtype == torch.float32 for p in self._parameters)

    @classmethod
    def update_bytes(cls, parameter: ParameterSpec, config: "OptimizerSection", size: int) -> int:
        # The kernel reads parameter, gradient and both moments, and writes all but the gradient.
        tensors = 4 + 3
        if config.clip_norm is not None:
            # It writes a scaled gradient too; in float64 `scale_gradients` does, and reads it.
            tensors += 1 if size == 4 else 2
        return tensors * size * math.prod(parameter.shape)

    def update(self, skip: Tensor, factor: Tensor | None) -> None:
        # The kernel itself divides gradients and skips, as for torch's GradScaler: clipping needs
        # no separate pass.
        grad_scale = None
        if factor is not None and self._kernel_scales:
            grad_scale = (1 / factor).float()
        else:
            scale_gradients(self._parameters, factor)
        self._adamw.grad_scale = grad_scale  # type: ignore[attr-defined]
        self._adamw.found_inf = skip  # type: ignore[attr-defined]
        # Without groups torch has an empty one.
        for group, torch_group in zip(self.groups, self._adamw.param_groups, strict=False):
            torch_group["lr"] = group.lr
        for parameters in self.home.visit():
            for torch_group in self._adamw.param_groups:
                torch_group["params"] = []
            for p in parameters:
                if p.local.numel() > 0:
                    self._torch_groups[p]["params"].append(p.local)
            self._adamw.step()

    def set_updates(self, updates: Tensor) -> None:
        for state in self._adamw.state.values():
            state["step"].copy_(updates)


class RoundedAdamW(UpdateRule):
    """AdamW in torch's order of operations and the weights' dtype; moments are rounded
    stochastically to bfloat16."""

    title = "AdamW in bfloat16"
    states = AdamW.states

    def __init__(
        self, groups: Sequence[ParamGroup], config: "OptimizerSection", mesh: Mesh
    ) -> None:
        super().__init__(groups, config, mesh)
        self._betas = config.betas
        self._eps = config.eps
        self._updates: Tensor | float = 0.0  # number of updates made

    @classmethod
    def state_specs(cls, parameter: ParameterSpec) -> dict[str, ParameterSpec]:
        return super().state_specs(replace(parameter, dtype=torch.bfloat16))

    @classmethod
    def update_bytes(cls, parameter: ParameterSpec, config: "OptimizerSection", size: int) -> int:
        # The sum over the operators of `update`, which are not fused.
        tensors = 40 if config.clip_norm is not None else 38  # in the dtype of the weights
        rounding = 364  # bytes per element: two moments in bfloat16, and random bits in int64
        return (tensors * size + rounding) * math.prod(parameter.shape)

    @torch.no_grad()
    def update(self, skip: Tensor, factor: Tensor | None) -> None:
        number = (self._updates + torch.ones_like(skip)).double()
        beta1, beta2 = self._betas
        now = _Update(number, 1 - beta1**number, 1 - beta2**number, skip.bool(), factor)
        for parameters in self.home.visit():
            for p in parameters:
                if p.local.numel() > 0:
                    self._update_in_blocks(p, self.group_of[p], now)
        self._updates = self._updates + 1 - skip

    def _update_in_blocks(self, p: LocalParameter, group: ParamGroup, now: "_Update") -> None:
        """So that no whole moment exists in the weights' dtype."""
        assert p.local.grad is not None  # `squared_norm` has set it
        weights, grads, exp_avgs, exp_avg_sqs = (
            torch.atleast_1d(x.detach())
            for x in (p.local, p.local.grad, p.state["exp_avg"], p.state["exp_avg_sq"])
        )
        first_dim, *other_dims = p.part
        for rows in blocks(weights.shape):
            old = weights[rows], exp_avgs[rows], exp_avg_sqs[rows]
            grad = grads[rows]
            if now.factor is not None:
                grad = grad * now.factor
            value, exp_avg, exp_avg_sq = self._adamw(*old, grad, group, now)

            # By the position in the whole parameter: the same bits on every layout.
            own_rows = slice(first_dim.start + rows.start, first_dim.start + rows.stop)
            bits = random_bits(p.spec.name, now.number, p.spec.dims, (own_rows, *other_dims))
            new = (
                value,
                round_stochastically(exp_avg, bits),
                round_stochastically(exp_avg_sq, bits >> 16),
            )
            for before, after in zip(old, new, strict=True):
                before.copy_(torch.where(now.skip, before, after))

    def _adamw(
        self,
        value: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        grad: Tensor,
        group: ParamGroup,
        now: "_Update",
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The new weights and moments in the weights' dtype:

        m <- b1 m + (1 - b1) g,    v <- b2 v + (1 - b2) g^2
        w <- (1 - lr decay) w - lr / (1 - b1^t) m / (sqrt(v / (1 - b2^t)) + eps)
        """
        beta1, beta2 = self._betas
        exp_avg = exp_avg.to(value.dtype)
        exp_avg_sq = exp_avg_sq.to(value.dtype)
        exp_avg.lerp_(grad, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)

        denominator = (exp_avg_sq / now.correction2).sqrt_().add_(self._eps)
        rate = group.lr / now.correction1
        decay = 1 - group.lr * group.options.weight_decay
        return value * decay - rate * (exp_avg / denominator), exp_avg, exp_avg_sq

    def set_updates(self, updates: Tensor) -> None:
        self._updates = updates.clone()


class _Update(NamedTuple):
    """What an update has in common for all parameters: scalars on the device."""

    number: Tensor  # t, from 1, in float64
    correction1: Tensor  # 1 - b1^t
    correction2: Tensor  # 1 - b2^t
    skip: Tensor  # bool: changes nothing
    factor: Tensor | None  # of the gradients; None: 1
