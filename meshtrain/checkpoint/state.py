"""The state in a checkpoint: the tensors of a run that this rank holds, and the part of the whole
that each one is.

One rank of each pipeline stage tells all others which tensors the stage has and which axes cut
them. The rest follows.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshtrain.checkpoint.placement import Placement, part_of_rank
from meshtrain.errors import InputError
from meshtrain.huggingface.load import KINDS, named_tensors
from meshtrain.huggingface.safetensors import by_numbers
from meshtrain.job.process import Job
from meshtrain.layout import Layout
from meshtrain.mesh import Mesh
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
        local, _ = local_part(self._live().detach())
        if local.dim() == 0:
            local = local.view(1)
        expected = shape_of(self.part)
        if tuple(local.shape) != expected:
            raise InputError(
                f"{self.name} has the shape {tuple(local.shape)}, and had {expected} when the run "
                "began: a checkpoint has room for that. Let its forward keep the shape, or "
                "register it with persistent=False"
            )
        return local


class OptimizerState(Protocol):
    """What a checkpoint has of an optimizer."""

    updates: Tensor  # the number of updates made, a scalar

    def state(self, parameter: Tensor) -> dict[str, tuple[ParameterSpec, Tensor]]:
        """The state of a parameter: name -> its spec, and this rank's part of it, not copied."""

    def take_updates(self) -> None:
        """Called when `updates` and the state were set from outside."""


class State:
    """All tensors that a run resumes from: the model, the optimizer, and in float16 the loss
    scale."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerState,
        mesh: Mesh,
        job: Job,
        scale: "LossScale | None" = None,
    ) -> None:
        """All ranks construct it together. Raises InputError: a tensor has a dtype that files
        cannot hold."""
        self.mesh = mesh
        self.layout = mesh.layout
        self._optimizer = optimizer
        tensors = [*_of_model(model, optimizer), *_of_run(optimizer, scale)]
        # Every tensor of the whole model by name, in the order of a file; the same on all ranks.
        self.placements = gather_placements([tensor.spec for tensor in tensors], job, mesh.layout)
        # This rank's parts of them, without empty parts. A weight tied between two stages of this
        # rank occurs twice.
        self.shards = list(self._local_shards(tensors, job.rank))

    def _local_shards(self, tensors: "list[_StateTensor]", rank: int) -> Iterator[LocalShard]:
        for tensor in tensors:
            name = tensor.spec.name
            placement = self.placements[name]
            part = part_of_rank(placement, self.layout, rank)
            assert part is not None, name  # this rank's stages have it
            # The part by DTensor's sharding and the part by the placement must agree. A plain
            # tensor does not say where it lies.
            live = tensor.live().detach()
            _, own_part = local_part(live)
            if isinstance(live, DTensor):
                assert own_part == part, name
            else:
                assert shape_of(own_part) == shape_of(part), name
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


def _of_model(model: nn.Module, optimizer: OptimizerState) -> Iterator[_StateTensor]:
    """Parameters, the optimizer's state of trained ones, and the persistent buffers of the
    model."""
    stages = model.stages() if isinstance(model, Pipeline) else [model]
    for stage in stages:
        for (name, *_), tensor in named_tensors(stage).items():
            spec = tensor_spec(f"{MODEL}.{name}", tensor)
            if not isinstance(tensor, nn.Parameter):
                # Looked up each time: a forward may replace a buffer by another tensor.
                yield _StateTensor(spec, partial(stage.get_buffer, name), compared=False)
                continue
            yield _StateTensor(spec, tensor.detach)
            for kind, (state_spec, local) in optimizer.state(tensor).items():
                state_name = f"{OPTIMIZER}.{name}.{kind}"
                state_spec = replace(state_spec, name=state_name, dtype=local.dtype)
                yield _StateTensor(state_spec, partial(_state_of, optimizer, tensor, kind))


def _state_of(optimizer: OptimizerState, parameter: Tensor, kind: str) -> Tensor:
    """A tensor of the optimizer's state as it is now: an update may replace it by another one."""
    _, local = optimizer.state(parameter)[kind]
    return local.detach()


def _of_run(optimizer: OptimizerState, scale: "LossScale | None") -> Iterator[_StateTensor]:
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
    # The first rank of each stage speaks for it.
    coordinate = layout.coordinate(job.rank)
    speaks = all(index == 0 for axis, index in coordinate.items() if axis != "pp")
    rows = None
    if speaks:
        rows = []
        for spec in specs:
            cuts = [(cut.axis, cut.dim) for cut in spec.cuts]
            rows.append([spec.name, _dtype_name(spec), list(spec.shape), cuts])
    rows_of_stages = job.reduce("comparing where tensors lie", rows, _spoken)

    placements: dict[str, Placement] = {}
    for rank, rows_of_stage in rows_of_stages:
        stages = {layout.index(rank, "pp")}
        for name, dtype, shape, cuts in rows_of_stage:
            # A tied weight is on several stages.
            holders = stages | set(placements[name].stages) if name in placements else stages
            placements[name] = Placement(
                shape=tuple(shape),
                dtype=dtype,
                cuts=tuple((axis, dim) for axis, dim in cuts),
                stages=tuple(sorted(holders)),
            )
    return {name: placements[name] for name in sorted(placements, key=by_numbers)}


def _spoken(reports: list[list | None]) -> list[tuple[int, list]]:
    """The ranks that have reported anything, and what."""
    return [(rank, rows) for rank, rows in enumerate(reports) if rows]


def _dtype_name(spec: ParameterSpec) -> str:
    """The name of a tensor's dtype in files."""
    if spec.dtype not in KINDS:
        types = ", ".join(str(dtype).removeprefix("torch.") for dtype in KINDS)
        raise InputError(
            f"{spec.name} has the type {spec.dtype}, and files of weights hold {types}: convert it"
        )
    return KINDS[spec.dtype]
