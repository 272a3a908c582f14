"""What a checkpoint is made of: the tensors of a run that this rank holds, and where each lies in the whole.

Of each index on `pp` one rank tells all others which tensors there are and which axes cut them. From that and the
layout every rank knows who holds which part of what; nothing is ever listed per rank.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn

from meshtrain import weights
from meshtrain.checkpoint.placement import Placement, held_part, is_empty
from meshtrain.cuts import Part
from meshtrain.errors import InputError
from meshtrain.huggingface import KINDS, named_tensors
from meshtrain.layout import Layout
from meshtrain.mesh import Mesh
from meshtrain.optim import AVERAGES, Optimizer
from meshtrain.parts import cut_axes, local_part
from meshtrain.pipeline.engine import Pipeline
from meshtrain.runtime import Job

if TYPE_CHECKING:
    from meshtrain.step import LossScale

MODEL, OPTIMIZER = "model", "optimizer"
UPDATES = f"{OPTIMIZER}.step"
LOSS_SCALE = ("loss_scale.value", "loss_scale.good")


@dataclass(frozen=True)
class Held:
    """A tensor of which this rank holds a part.

    Attributes:
        placement: of the whole.
        part: where in the whole this rank's part lies; a scalar counts as one dim of size 1.
        compared: whether all ranks with the same part must have the same bits. Buffers that a forward changes (running
            statistics) follow from the samples that a rank sees, and may differ.
    """

    name: str
    placement: Placement
    part: Part
    compared: bool
    _live: Callable[[], Tensor]

    @property
    def local(self) -> Tensor:
        """The memory that training works on, in the shape of the part."""
        tensor = local_part(self._live().detach())[0]
        return tensor if tensor.dim() else tensor.view(1)


class State:
    """All that a run goes on from: the model, the optimizer, and in float16 the loss scale.

    Attributes:
        placements: every tensor of the whole model by name, in the order of a file; the same on all ranks.
        held: what this rank has of them, without empty parts. A tied weight of two stages of this rank comes twice.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, mesh: Mesh, job: Job, scale: "LossScale | None" = None
    ) -> None:
        """All ranks make theirs together.

        Raises:
            InputError: a tensor has a type that files cannot hold.
        """
        self.layout = mesh.layout
        self._optimizer = optimizer
        found = [*_of_model(model, optimizer), *_for_all(optimizer, scale)]
        self.placements = spread({one.name: one.like for one in found}, job, mesh.layout)
        self.held = list(self._kept(found, job.rank))

    def _kept(self, found: "list[_Found]", rank: int) -> Iterator[Held]:
        for one in found:
            placement, part = self.placements[one.name], local_part(one.like.detach())[1]
            assert part == held_part(placement, self.layout, rank), one.name  # one rule for training and for files
            if not is_empty(part):
                yield Held(one.name, placement, part, one.compared, one.live)

    def loaded(self) -> None:
        """What was held has new values."""
        self._optimizer.take_updates()


@dataclass(frozen=True)
class _Found:
    """A tensor that is here. `like`: the parameter that has its shape and lies as it does."""

    name: str
    like: Tensor
    live: Callable[[], Tensor]
    compared: bool = True


def _of_model(model: nn.Module, optimizer: Optimizer) -> Iterator[_Found]:
    """Parameters, AdamW's averages of those that are trained, and the buffers that are part of a model's state."""
    for stage in model.stages() if isinstance(model, Pipeline) else [model]:
        for (name, *_), tensor in named_tensors(stage).items():
            if not isinstance(tensor, nn.Parameter):
                # A forward may put another tensor in the place of a buffer.
                yield _Found(f"{MODEL}.{name}", tensor, partial(stage.get_buffer, name), compared=False)
                continue
            yield _Found(f"{MODEL}.{name}", tensor, partial(_same, tensor))
            for average in AVERAGES if optimizer.trains(tensor) else ():
                live = partial(optimizer.average, tensor, average)
                yield _Found(f"{OPTIMIZER}.{name}.{average}", tensor, live)


def _for_all(optimizer: Optimizer, scale: "LossScale | None") -> Iterator[_Found]:
    """What every rank has."""
    yield _Found(UPDATES, optimizer.updates, partial(_same, optimizer.updates))
    if scale is not None:
        for name, tensor in zip(LOSS_SCALE, (scale.value, scale.good), strict=True):
            yield _Found(name, tensor, partial(_same, tensor))


def _same(tensor: Tensor) -> Tensor:
    return tensor


def spread(tensors: Mapping[str, Tensor], job: Job, layout: Layout) -> dict[str, Placement]:
    """Where all tensors of the whole model lie, in the order of their names, also those that only other ranks hold.

    Of the ranks with one index on `pp`, whose tensors are the same, the first tells. All ranks call it together and
    get the same answer.

    Raises:
        InputError: a tensor has a type that files cannot hold.
    """
    told = None
    if not any(i for axis, i in layout.coordinate(job.rank).items() if axis != "pp"):
        told = [[name, _kind(name, one), list(one.shape), cut_axes(one)] for name, one in tensors.items()]
    found: dict[str, Placement] = {}
    for rank, there in enumerate(job.gather("comparing where tensors lie", told)):
        index = layout.coordinate(rank).get("pp", 0)
        for name, kind, shape, cuts in there or ():
            stages = {index, *found[name].stages} if name in found else {index}
            axes = tuple((axis, dim) for axis, dim in cuts)
            found[name] = Placement(tuple(shape), kind, axes, tuple(sorted(stages)))
    return {name: found[name] for name in sorted(found, key=weights.by_numbers)}


def _kind(name: str, tensor: Tensor) -> str:
    if tensor.dtype not in KINDS:
        types = ", ".join(str(dtype).removeprefix("torch.") for dtype in KINDS)
        raise InputError(f"{name} has the type {tensor.dtype}, and files of weights hold {types}: convert it")
    return KINDS[tensor.dtype]
