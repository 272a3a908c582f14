"""Refuses a model whose first training forward changes its own state, of which each rank, or the
recomputation of a block, would have another."""

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshtrain.errors import AgreedError, InputError
from meshtrain.layout import LOSS_AXES
from meshtrain.mesh import Mesh
from meshtrain.parallel.sync_batch_norm import SyncBatchNorm
from meshtrain.parallel.torch_private import own_parameters, persistent_buffers, to_local


class Digest(NamedTuple):
    """What a tensor is compared by."""

    shape: torch.Size
    # Sum and norm, in float64. Both, because normalised values keep their norm when they change.
    numbers: Tensor


def refuse_side_effects(model: nn.Module, mesh: Mesh, again: Collection[nn.Module]) -> None:
    """Makes the model's first training forward raise AgreedError (in a pipeline InputError, on the
    ranks of one stage) if it changes a parameter or a persistent buffer. A buffer that was empty is
    a cache, which may be filled.

    Args:
        again: the modules whose forward is recomputed in the backward; on one data rank only these
            are checked.
    """
    several = mesh.size(*LOSS_AXES) > 1
    before: dict[str, Digest] = {}

    def state_of(module: nn.Module) -> dict[str, Tensor | None]:
        """The tensors of a module itself that its forward may not change."""
        if isinstance(module, SyncBatchNorm) and module not in again:
            return {}  # each rank has the same statistics
        state: dict[str, Tensor | None] = {}
        if several or module in again:
            state |= persistent_buffers(module)
        # FSDP itself refuses writes to gathered parameters.
        if several and not mesh.uses_fsdp:
            state |= own_parameters(module)
        return state

    def digests() -> Iterator[tuple[str, Digest]]:
        for module_name, module in model.named_modules():
            for name, tensor in state_of(module).items():
                if tensor is not None:
                    yield f"{module_name}.{name}".lstrip("."), _digest(tensor)

    def begin(model: nn.Module, *unused: Any) -> None:
        if model.training and torch.is_grad_enabled():
            before.update(digests())

    def end(model: nn.Module, *unused: Any) -> None:
        if not model.training or not torch.is_grad_enabled():
            return
        for hook in hooks:
            hook.remove()
        if not before:
            return
        problems = [_refusal(name, several) for name in _changed(before, dict(digests()))]
        before.clear()
        if mesh.size("pp") > 1:
            # Stages run their first forwards at different times, so ranks cannot agree here.
            if problems:
                raise InputError(problems[0])
            return
        of_ranks = [problems]
        if mesh.world is not None:
            of_ranks = [[] for _ in range(mesh.layout.world_size)]
            dist.all_gather_object(of_ranks, problems[:1], group=mesh.world)
        for of_rank in of_ranks:
            if of_rank:
                raise AgreedError(of_rank[0])

    hooks = (model.register_forward_pre_hook(begin, prepend=True), model.register_forward_hook(end))


def _changed(before: dict[str, Digest], after: dict[str, Digest]) -> list[str]:
    """The tensors that differ, but for those that were empty or are gone."""
    names = [name for name, old in before.items() if name in after and 0 not in old.shape]
    if not names:
        return []
    # All numbers in one tensor, so that the host waits for the device once.
    old_numbers = torch.stack([before[name].numbers for name in names]).tolist()
    new_numbers = torch.stack([after[name].numbers for name in names]).tolist()
    changed = []
    for name, old, new in zip(names, old_numbers, new_numbers, strict=True):
        # As text, in which NaN equals itself.
        if before[name].shape != after[name].shape or repr(old) != repr(new):
            changed.append(name)
    return changed


def _refusal(name: str, several: bool) -> str:
    if several:
        reason = (
            "with several data ranks or cp each rank would have its own, and the loss would depend "
            "on the layout"
        )
        remedy = (
            "sum what it is made of over the global batch (meshtrain.loss.tally), use one data "
            "rank and cp: 1"
        )
    else:
        reason = "a block that is recomputed would change it twice"
        remedy = "use recompute: none"
    return (
        f"the model's forward changes {name} in training, and {reason}: {remedy}, or, if no result "
        "follows from it, leave this check out by parallel.verify: false (verify=False)"
    )


def _digest(tensor: Tensor) -> Digest:
    x = to_local(tensor.detach())
    if x.is_complex():
        x = torch.view_as_real(x)
    elif not x.is_floating_point():
        x = x.double()
    norm = torch.linalg.vector_norm(x, dtype=torch.float64)
    return Digest(x.shape, torch.stack([x.sum(dtype=torch.float64), norm]))
