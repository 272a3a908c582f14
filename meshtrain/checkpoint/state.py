"""The state in a checkpoint: the tensors of a run that this rank holds, and the part of the whole
that each one is.

One rank of each pipeline stage tells all others which tensors the stage has and which axes cut
them. The rest follows.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshtrain.checkpoint.placement import Placement, part_of_rank
from meshtrain.errors import InputError
from meshtrain.huggingface import safetensors as weights
from meshtrain.huggingface.load import KINDS, named_tensors
from meshtrain.job.process import Job
from meshtrain.layout import Layout
from meshtrain.mesh import Mesh
from meshtrain.optim.optimizer import Optimizer
from meshtrain.parallel.sharding import (
    ParameterSpec,
    Part,
    is_empty,
    local_part,
    shape_of,
    tensor_spec,
)
from meshtrain.pipeline.engine import Pipeline

if TYPE_CHECKING:
    from meshtrain.trainer import LossScale

MODEL, OPTIMIZER = "model", "optimizer"
UPDATES = f"{OPTIMIZER}.step"
LOSS_SCALE = ("loss_scale.value", "loss_scale.good")


@dataclass(frozen=True)
class LocalShard:
    """A tensor of which this rank holds a part."""

    name: str
    placement: Placement  # placement of the whole tensor
    part: Part  # its place in the whole tensor; a scalar counts as one dim of size 1
    # whether copies must be bit-equal, unlike running statistics, which depend on a rank's samples
    compared: bool
    _live: Callable[[], Tensor]

    @property
    def local(self) -> Tensor:
        """The tensor that training uses, in the shape of the part. Raises InputError: a buffer
        changed shape."""
        tensor = local_part(self._live().detach())[0]
        own, expected = tensor if tensor.dim() else tensor.view(1), shape_of(self.part)
        if tuple(own.shape) != tuple(expected):
            raise InputError(
                f"{self.name} has the shape {tuple(own.shape)}, and had {tuple(expected)} when the "
                "run began: a "
                "checkpoint has room for that. Let its forward keep the shape, or register it with "
                "persistent=False"
            )
        return own


class State:
    """All tensors that a run resumes from: the model, the optimizer, and in float16 the loss
    scale."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        mesh: Mesh,
        job: Job,
        scale: "LossScale | None" = None,
    ) -> None:
        """All ranks construct it together. Raises InputError: a tensor has a dtype that files
        cannot hold."""
        self.mesh, self.layout = mesh, mesh.layout
        self._optimizer = optimizer
        tensors = [*_of_model(model, optimizer), *_of_run(optimizer, scale)]
        # Every tensor of the whole model by name, in the order of a file; the same on all ranks.
        self.placements = gather_placements([tensor.spec for tensor in tensors], job, mesh.layout)
        # This rank's parts of them, without empty parts. A weight tied between two stages of this
        # rank occurs twice.
        self.shards = list(self._local_shards(tensors, job.rank))

    def _local_shards(self, tensors: "list[_StateTensor]", rank: int) -> Iterator[LocalShard]:
        for tensor in tensors:
            name, live = tensor.spec.name, tensor.live().detach()
            placement = self.placements[name]
            part, own = part_of_rank(placement, self.layout, rank), local_part(live)[1]
            assert part is not None, name  # this rank's stages have it
            # The part by DTensor's sharding and the part by the placement must agree.
            assert own == part if isinstance(live, DTensor) else shape_of(own) == shape_of(part), (
                name
            )
            if not is_empty(part):
                yield LocalShard(name, placement, part, tensor.compared, tensor.live)

    def loaded(self) -> None:
        """To be called when the tensors have been filled with new values."""
        self._optimizer.take_updates()


@dataclass(frozen=True)
class _StateTensor:
    """A tensor of which this rank has a part; `live` returns a DTensor, or the part as a plain
    tensor."""

    spec: ParameterSpec
    live: Callable[[], Tensor]
    compared: bool = True


def _of_model(model: nn.Module, optimizer: Optimizer) -> Iterator[_StateTensor]:
    """Parameters, the optimizer's state of trained ones, and the persistent buffers of the
    model."""
    for stage in model.stages() if isinstance(model, Pipeline) else [model]:
        for (name, *_), tensor in named_tensors(stage).items():
            spec = tensor_spec(f"{MODEL}.{name}", tensor)
            if not isinstance(tensor, nn.Parameter):
                # Looked up each time: a forward may replace a buffer by another tensor.
                yield _StateTensor(spec, partial(stage.get_buffer, name), compared=False)
                continue
            yield _StateTensor(spec, tensor.detach)
            for kind, (own, local) in optimizer.state(tensor).items():
                own = replace(own, name=f"{OPTIMIZER}.{name}.{kind}", dtype=local.dtype)
                yield _StateTensor(own, local.detach)


def _of_run(optimizer: Optimizer, scale: "LossScale | None") -> Iterator[_StateTensor]:
    yield _StateTensor(tensor_spec(UPDATES, optimizer.updates), optimizer.updates.detach)
    if scale is not None:
        for name, tensor in zip(LOSS_SCALE, (scale.value, scale.good), strict=True):
            yield _StateTensor(tensor_spec(name, tensor), tensor.detach)


def gather_placements(
    specs: Iterable[ParameterSpec], job: Job, layout: Layout
) -> dict[str, Placement]:
    """The placements of all tensors of the whole model, sorted by name, including those that only
    other ranks hold.

    All ranks call it together and get the same. Raises InputError: a tensor has a dtype that files
    cannot hold.
    """
    rows = None
    if not any(i for axis, i in layout.coordinate(job.rank).items() if axis != "pp"):
        rows = [
            [spec.name, _kind(spec), list(spec.shape), [(cut.axis, cut.dim) for cut in spec.cuts]]
            for spec in specs
        ]
    placements: dict[str, Placement] = {}
    stages = job.reduce(
        "comparing where tensors lie", rows, lambda of: [pair for pair in enumerate(of) if pair[1]]
    )
    for rank, of_stage in stages:
        index = layout.index(rank, "pp")
        for name, kind, shape, cuts in of_stage:
            holders = {index, *placements[name].stages} if name in placements else {index}
            axes = tuple((axis, dim) for axis, dim in cuts)
            placements[name] = Placement(tuple(shape), kind, axes, tuple(sorted(holders)))
    return {name: placements[name] for name in sorted(placements, key=weights.by_numbers)}


def _kind(spec: ParameterSpec) -> str:
    if spec.dtype not in KINDS:
        types = ", ".join(str(dtype).removeprefix("torch.") for dtype in KINDS)
        raise InputError(
            f"{spec.name} has the type {spec.dtype}, and files of weights hold {types}: convert it"
        )
    return KINDS[spec.dtype]
