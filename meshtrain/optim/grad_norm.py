"""The global norm of gradients, and clipping by it; an element counts once, however many ranks hold
it."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshtrain.errors import InputError
from meshtrain.huggingface.stored_names import Table, table_of
from meshtrain.mesh import Mesh
from meshtrain.parallel.collectives import axis_group
from meshtrain.parallel.ddp import BucketedReduceScatter, Rows
from meshtrain.parallel.grad_sync import gradient_syncs
from meshtrain.parallel.mixed_precision import sum_dtype
from meshtrain.parallel.sharding import ParameterSpec, chunk_range, optimizer_shard, parameters_of
from meshtrain.parallel.torch_private import from_local, to_local


class LocalParameter:
    """A trainable parameter, and the part of it that this rank holds, as a plain tensor that shares
    its memory.

    Attributes:
        copies: number of copies of each element in the job.
        local: this rank's part, or with ZeRO-1 the rows of it that this rank updates; it may be
            empty. `local.grad` is its gradient once `take_grad` was called. part: its position in
            the whole parameter.
        stored_as: how files name and divide the model's tensors.
        state: the optimizer's state tensors, by name. state_specs: how each of them is sharded.
    """

    def __init__(
        self,
        spec: ParameterSpec,
        parameter: nn.Parameter,
        mesh: Mesh,
        stored_as: Table,
        shared: bool = False,
    ) -> None:
        """`shared`: whether each copy of the parameter updates only some of its rows (ZeRO-1)."""
        self.parameter = parameter
        self.stored_as = stored_as
        self.spec = spec
        self.local = to_local(parameter.detach())
        self._rows: slice | None = None  # the rows of the held part that this rank updates
        if shared:
            self.spec = optimizer_shard(spec, mesh.layout)
            axis = self.spec.cuts[-1].axis
            held = torch.atleast_1d(self.local)
            self._rows = chunk_range(held.shape[0], mesh.size(axis), mesh.index(axis))
            self.local = held[self._rows]
            self._copies = axis_group(mesh, axis)
        self.local.requires_grad_()

        position = {cut.axis: mesh.index(cut.axis) for cut in self.spec.cuts}
        self.part = self.spec.part(position)
        self.copies = self.spec.copies(mesh.layout)
        self.state: dict[str, Tensor] = {}
        self.state_specs: dict[str, ParameterSpec] = {}

    def take_grad(self) -> Tensor:
        """This rank's part of the gradient, used by the next update: zeros if no forward used the
        parameter.

        Under DDP another rank may have used the parameter, so a gradient must exist; DDP then
        creates it on every rank. Raises InputError: the gradient is sparse.
        """
        grad = self.parameter.grad
        if grad is not None and grad.layout != torch.strided:
            raise InputError(
                f"the gradient of {self.spec.name} is sparse: leave `sparse` out of the layer that "
                "makes it"
            )
        own = torch.zeros_like(self.local) if grad is None else self._own(to_local(grad))
        self.local.grad = own
        return own

    def _own(self, held: Tensor) -> Tensor:
        """Of a tensor like the part that this rank holds, the rows that it updates."""
        return held if self._rows is None else torch.atleast_1d(held)[self._rows]

    def whole(self, local: Tensor) -> Tensor:
        """Gathers a tensor that is sharded like the parameter: a collective of the ranks that share
        it."""
        held = local.detach()
        if self._rows is not None:
            held = torch.empty_like(to_local(self.parameter.detach()), dtype=local.dtype)
            self._own(held).copy_(local.detach())
            Rows([held], self._copies).gather()
        tensor = from_local(held, self.parameter)
        return tensor.full_tensor() if isinstance(tensor, DTensor) else held


def local_parameters(model: nn.Module, mesh: Mesh) -> list[LocalParameter]:
    """The trainable parameters of a model, or of this rank's pipeline stages."""
    table = table_of(stages_of(model)[0])
    shared = {p for sync in optimizer_shards(model) for p in sync.parameters}
    return [
        LocalParameter(spec, p, mesh, table, shared=p in shared)
        for spec, p in parameters_of(model)
        if spec.trainable
    ]


def optimizer_shards(model: nn.Module) -> list[BucketedReduceScatter]:
    """The reducers that gather the updated rows (ZeRO-1) of a model, or of this rank's pipeline
    stages."""
    return [
        sync
        for stage in stages_of(model)
        for sync in gradient_syncs(stage)
        if isinstance(sync, BucketedReduceScatter)
    ]


def stages_of(model: nn.Module) -> list[nn.Module]:
    """This rank's stages of a `Pipeline`; a model itself."""
    # Known by an attribute: pipeline/ stands above this room.
    return model.stages() if hasattr(model, "parameter_stages") else [model]  # type: ignore[operator]


def device_of(model: nn.Module, mesh: Mesh) -> torch.device:
    """The device of a model; a pipeline stage may have no parameters."""
    first = next(model.parameters(), None)
    return torch.device(mesh.device_type) if first is None else first.device


def squared_norm(parameters: Sequence[LocalParameter], device: torch.device) -> Tensor:
    """A rank's contribution to the squared norm, to be summed over all ranks: copies of an element
    count once."""
    by_copies: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        grad = parameter.take_grad()
        if grad.numel() > 0:
            by_copies.setdefault(parameter.copies, []).append(grad)

    total = torch.zeros((), dtype=torch.float64, device=device)
    for copies, grads in by_copies.items():
        dtype = sum_dtype(device)
        for grad_dtype in {grad.dtype for grad in grads}:
            dtype = torch.promote_types(dtype, grad_dtype)
        norms = torch.stack(torch._foreach_norm(grads, 2, dtype))
        # All copies add the same: together they add it once.
        total = total + norms.double().square().sum() / copies
    return total


def clip_factor(norm: Tensor, clip_norm: float | None) -> Tensor | None:
    """The factor that limits gradients of this global norm to at most `clip_norm`; None without
    clipping."""
    if clip_norm is None:
        return None
    return (clip_norm / (norm + 1e-6)).clamp(max=1.0)


def scale_gradients(parameters: Sequence[LocalParameter], factor: Tensor | None) -> None:
    """Multiplies the gradients collected by `squared_norm` by a scalar on the device; None: by
    1."""
    grads = [parameter.local.grad for parameter in parameters if parameter.local.grad is not None]
    if factor is not None and grads:
        torch._foreach_mul_(grads, factor.to(grads[0].dtype))


def clip_gradients(model: nn.Module, mesh: Mesh, max_norm: float) -> Tensor:
    """Clips the gradients of a parallelized model by their global norm, in a training loop of your
    own.

    Returns the norm before clipping, a scalar in float64, the same on every rank.
    """
    parameters = local_parameters(model, mesh)
    norm = mesh.sum(squared_norm(parameters, device_of(model, mesh))).sqrt()
    scale_gradients(parameters, clip_factor(norm, max_norm))
    return norm


def param_groups(model: nn.Module) -> list[dict[str, list[nn.Parameter]]]:
    """Parameter groups of a model, parallelized or not, for torch's optimizers in a training loop
    of your own.

    torch updates all tensors of a group with one kernel, which takes DTensors (split by `tp`) or
    plain ones, not both.
    """
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return [{"params": group} for group in groups.values()]
