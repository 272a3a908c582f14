"""AdamW (Loshchilov and Hutter, https://arxiv.org/abs/1711.05101), by torch's fused kernel over all local parts."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshtrain.optim.optimizer import ParamGroup, UpdateRule
from meshtrain.parallel.sharding import ParameterSpec

if TYPE_CHECKING:
    from meshtrain.config import Optimizer as OptimizerConfig


class AdamW(UpdateRule):
    title = "AdamW"

    def __init__(self, groups: Sequence[ParamGroup], config: "OptimizerConfig") -> None:
        super().__init__(groups, config)
        # A shard of a small parameter may be empty, and a stage of a pipeline may have nothing to train.
        self._filled = [(group, [p for p in group.parameters if p.local.numel() > 0]) for group in groups]
        params = [
            {"params": [p.local for p in filled], "weight_decay": group.options.weight_decay}
            for group, filled in self._filled
        ]
        keys: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps, "fused": True}
        self._adamw = torch.optim.AdamW(params or [{"params": []}], **keys)
        for _, filled in self._filled:
            for p in filled:
                step = torch.zeros((), dtype=torch.float32, device=p.local.device)
                self._adamw.state[p.local] = {"step": step, **p.state}

    @staticmethod
    def state_specs(parameter: ParameterSpec) -> dict[str, ParameterSpec]:
        return {name: replace(parameter, name=f"{parameter.name}.{name}") for name in ("exp_avg", "exp_avg_sq")}

    def update(self, skip: Tensor) -> None:
        for (group, _), own in zip(self._filled, self._adamw.param_groups, strict=False):
            own["lr"] = group.lr
        self._adamw.found_inf = skip  # type: ignore[attr-defined]  # the kernel skips by itself, as for torch's GradScaler
        self._adamw.step()

    def set_updates(self, updates: Tensor) -> None:
        for state in self._adamw.state.values():
            state["step"].copy_(updates)
