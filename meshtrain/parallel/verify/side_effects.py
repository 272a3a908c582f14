"""Refuses a model whose first training forward changes its own state, of which each rank, or the
recomputation of a block, would have another."""

from collections.abc import Collection, Iterator
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshtrain.errors import AgreedError, InputError
from meshtrain.layout import LOSS_AXES
from meshtrain.mesh import Mesh
from meshtrain.parallel.sync_batch_norm import SyncBatchNorm
from meshtrain.parallel.torch_private import persistent_buffers, to_local


def refuse_side_effects(model: nn.Module, mesh: Mesh, again: Collection[nn.Module]) -> None:
    """Makes the model's first training forward raise AgreedError (in a pipeline InputError, on the
    ranks of one stage) if it changes a parameter or a persistent buffer. A buffer that was empty is
    a cache, which may be filled.

    Args:
        again: the modules whose forward is recomputed in the backward; on one data rank only these
            are checked.
    """
    several = mesh.size(*LOSS_AXES) > 1
    parameters = several and not mesh.uses_fsdp  # FSDP itself refuses writes to gathered parameters
    before: dict[str, tuple[torch.Size, Tensor]] = {}

    def digests() -> Iterator[tuple[str, tuple[torch.Size, Tensor]]]:
        for module_name, module in model.named_modules():
            if isinstance(module, SyncBatchNorm) and module not in again:
                continue  # each rank has the same statistics
            own = persistent_buffers(module) if several or module in again else {}
            own |= module._parameters if parameters else {}
            yield from (
                (f"{module_name}.{name}".lstrip("."), _digest(x))
                for name, x in own.items()
                if x is not None
            )

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
        after = dict(digests())
        names = [name for name, (shape, _) in before.items() if name in after and 0 not in shape]
        shapes = [[of[name][0] for name in names] for of in (before, after)]
        values = [
            torch.stack([of[name][1] for name in names]).tolist() if names else []
            for of in (before, after)
        ]
        before.clear()
        pairs = zip(
            names,
            zip(shapes[0], values[0], strict=True),
            zip(shapes[1], values[1], strict=True),
            strict=True,
        )
        problems = [_refusal(name, several) for name, old, new in pairs if repr(old) != repr(new)]
        if mesh.size("pp") > 1:  # stages run their first forwards at different times
            if problems:
                raise InputError(problems[0])
            return
        every = [problems]
        if mesh.world is not None:
            every = [[] for _ in range(mesh.layout.world_size)]
            dist.all_gather_object(every, problems[:1], group=mesh.world)
        for problem in chain(*every):
            raise AgreedError(problem)

    hooks = (model.register_forward_pre_hook(begin, prepend=True), model.register_forward_hook(end))


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
        reason, remedy = "a block that is recomputed would change it twice", "use recompute: none"
    return (
        f"the model's forward changes {name} in training, and {reason}: {remedy}, or, if no result "
        "follows from it, "
        "leave this check out by parallel.verify: false (verify=False)"
    )


def _digest(tensor: Tensor) -> tuple[torch.Size, Tensor]:
    """Shape, sum and norm of a tensor. Both, because normalised values keep their norm when they
    change."""
    x = to_local(tensor.detach())
    x = torch.view_as_real(x) if x.is_complex() else x if x.is_floating_point() else x.double()
    norm = torch.linalg.vector_norm(x, dtype=torch.float64)
    return x.shape, torch.stack([x.sum(dtype=torch.float64), norm])
