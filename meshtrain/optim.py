"""AdamW, the learning rate as a function of the step, and clipping by the norm over the whole mesh."""

import math
from functools import reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshtrain.mesh import Mesh
from meshtrain.numerics import sum_dtype

if TYPE_CHECKING:
    from meshtrain.config import Optimizer as OptimizerConfig

AVERAGES = ("exp_avg", "exp_avg_sq")  # of AdamW for each parameter, in torch's words


def learning_rate(config: "OptimizerConfig", step: int, total_steps: int) -> float:
    """The learning rate of update `step` (from 1) of `total_steps`.

    Warm-up is linear and reaches `lr` at its last update. Then: "cosine" and "linear" fall to `min_lr` at the last
    step, "wsd" (warm-up, stable, decay; Hu et al., https://arxiv.org/abs/2404.06395) stays and falls linearly over the
    last `decay_steps`, "constant" stays.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    start = config.warmup_steps
    if config.schedule == "wsd":
        decay = config.decay_steps if config.decay_steps is not None else max(1, total_steps // 10)
        start = max(start, total_steps - decay)
    done = min(1.0, max(0.0, (step - start) / max(1, total_steps - start)))
    if config.schedule == "constant":
        share = 1.0
    elif config.schedule == "cosine":
        share = (1 + math.cos(math.pi * done)) / 2
    else:
        share = 1 - done
    return config.min_lr + (config.lr - config.min_lr) * share


class Optimizer:
    """AdamW over the parts of the parameters that this rank holds (Loshchilov and Hutter, https://arxiv.org/abs/1711.05101).

    torch's optimizer sees plain local tensors that share memory with the shards: one fused kernel then updates them
    all, whatever mesh each of them lies on. Parameters of one dim (norms, biases) do not decay.
    """

    def __init__(self, model: nn.Module, config: "OptimizerConfig", mesh: Mesh, total_steps: int) -> None:
        self.config = config
        self.total_steps = total_steps
        self._held = _held_by(model, mesh)
        kept = [held for held in self._held if held.local.numel() > 0]  # a shard of a small parameter may be empty
        groups = [
            {"params": [h.local for h in kept if h.parameter.dim() > 1], "weight_decay": config.weight_decay},
            {"params": [h.local for h in kept if h.parameter.dim() <= 1], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]] or [{"params": [torch.zeros(0, requires_grad=True)]}],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )
        # The state is there before the first update, so that a checkpoint can be loaded into it.
        self.updates = torch.zeros((), dtype=torch.float32, device=_device(model, mesh))  # done, none skipped
        self._trained = {held.parameter for held in self._held}
        self._states: dict[Tensor, dict[str, Tensor]] = {}
        for held in kept:
            averages = {name: torch.zeros_like(held.local, requires_grad=False) for name in AVERAGES}
            self._states[held.parameter] = {"step": self.updates.clone(), **averages}
            self._adamw.state[held.local] = self._states[held.parameter]

    def trains(self, parameter: Tensor) -> bool:
        """Whether a parameter of the model is one that updates change."""
        return parameter in self._trained

    def average(self, parameter: Tensor, name: str) -> Tensor:
        """One of the `AVERAGES` for this rank's part of a parameter, which is not empty, on the optimizer's memory."""
        return self._states[parameter][name]

    def take_updates(self) -> None:
        """`updates` was set from outside: AdamW counts on from there."""
        for state in self._states.values():
            state["step"].copy_(self.updates)

    def squared_norm(self) -> Tensor:
        """This rank's contribution to the squared global norm of the gradients: a scalar in float64."""
        return _squared_norm(self._held, self.updates.device)

    def update(self, step: int, factor: Tensor | None, skip: Tensor) -> float:
        """One update with gradients that are multiplied by `factor`; nothing waits for the device.

        Args:
            step: the number of this update, from 1.
            factor: a scalar on the device, or None for 1.
            skip: a scalar on the device; the update does not happen where it is 1.

        Returns:
            The learning rate that was used.
        """
        grads = [held.local.grad for held in self._held if held.local.grad is not None]
        if factor is not None and grads:
            torch._foreach_mul_(grads, factor.to(grads[0].dtype))
        lr = learning_rate(self.config, step, self.total_steps)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        skipped = skip.to(torch.float32)
        self._adamw.found_inf = skipped  # type: ignore[attr-defined]  # as torch's GradScaler does
        self._adamw.step()
        self.updates += 1 - skipped
        return lr

    def zero_grad(self) -> None:
        """Forgets all gradients."""
        for held in self._held:
            held.parameter.grad = None
            held.local.grad = None


class _Held:
    """A parameter, and the part of it that this rank holds, as a plain tensor on the same memory."""

    def __init__(self, parameter: nn.Parameter, mesh: Mesh, stages: int) -> None:
        """`stages`: of a pipeline, how many hold the parameter."""
        self.parameter = parameter
        local = parameter.detach()
        self.local = local.to_local() if isinstance(local, DTensor) else local
        self.local.requires_grad_()
        self.copies = stages * mesh.layout.world_size // mesh.size("pp") // _shards(parameter)

    def take_grad(self) -> Tensor:
        """This rank's part of the gradient; also what the next update uses.

        A parameter that no forward used has a gradient of zeros. Under DDP it may have been used on another rank, so
        there it must have one; then it has one everywhere.
        """
        grad = self.parameter.grad
        if grad is None:
            self.local.grad = torch.zeros_like(self.local)
        else:
            self.local.grad = grad.to_local() if isinstance(grad, DTensor) else grad
        assert self.local.grad is not None
        return self.local.grad


def _held_by(model: nn.Module, mesh: Mesh) -> list[_Held]:
    """What is trained of a model, or of the stages that this rank has of it."""
    stages = getattr(model, "copies", lambda name: 1)
    return [_Held(p, mesh, stages(name)) for name, p in model.named_parameters() if p.requires_grad]


def _shards(parameter: nn.Parameter) -> int:
    """Into how many different parts the ranks have split a parameter."""
    if not isinstance(parameter, DTensor):
        return 1
    mesh = parameter.device_mesh
    return math.prod(mesh.size(i) for i, placement in enumerate(parameter.placements) if not placement.is_replicate())


def _device(model: nn.Module, mesh: Mesh) -> torch.device:
    """Where a model is trained; a stage of a pipeline may have nothing to train."""
    first = next(model.parameters(), None)
    return torch.device(mesh.device_type) if first is None else first.device


def _squared_norm(parameters: list[_Held], device: torch.device) -> Tensor:
    """A rank's contribution to the squared norm: the sum of it over all ranks is the squared norm.

    Each element counts once, divided among the ranks that hold it.
    """
    by_copies: dict[int, list[Tensor]] = {}
    for held in parameters:
        grad = held.take_grad()
        if grad.numel() > 0:
            by_copies.setdefault(held.copies, []).append(grad)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for copies, grads in by_copies.items():
        dtype = reduce(torch.promote_types, {grad.dtype for grad in grads}, sum_dtype(total.device))
        total = total + torch.stack(torch._foreach_norm(grads, 2, dtype)).double().square().sum() / copies
    return total


def clip_factor(norm: Tensor, clip_norm: float | None) -> Tensor | None:
    """What gradients of this global norm are multiplied by so that their norm is at most `clip_norm`; None for 1."""
    if clip_norm is None:
        return None
    return (clip_norm / (norm + 1e-6)).clamp(max=1.0)


def param_groups(model: nn.Module) -> list[dict[str, list[nn.Parameter]]]:
    """The parameters of a model, parallelized or not, as torch's optimizers want them in a loop of one's own.

    With `tp`, split parameters are DTensors and others are plain. torch updates all tensors of a group by one kernel
    where it can (`foreach`, which is the default on GPUs, and `fused`), and that takes one kind of tensor only.
    """
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return [{"params": group} for group in groups.values()]


def clip_gradients(model: nn.Module, mesh: Mesh, max_norm: float) -> Tensor:
    """Clips the gradients of a parallelized model by their global norm, in a loop of one's own.

    Returns:
        The norm before clipping, a scalar in float64, the same on every rank.
    """
    held = _held_by(model, mesh)
    norm = mesh.sum(_squared_norm(held, _device(model, mesh))).sqrt()
    factor = clip_factor(norm, max_norm)
    grads = [one.local.grad for one in held if one.local.grad is not None]
    if factor is not None and grads:
        torch._foreach_mul_(grads, factor.to(grads[0].dtype))
    return norm
