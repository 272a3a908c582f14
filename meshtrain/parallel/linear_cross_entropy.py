"""The loss without logits: a model's last linear layer and the cross entropy behind it, a chunk of tokens at a time.

The logits of all tokens are the largest tensor of a step, and their gradient is another. Here a chunk's logits become
its losses and are overwritten by their gradient, from which follow the gradients of the layer's input and weight at
once, in the forward (as Liger Kernel has it, https://arxiv.org/abs/2410.10989). They are held until the backward, which
only hands them on: the weight's as one sum over all microbatches under way. With a pipeline schedule that splits
backwards the gradient of this weight is therefore not put off.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshtrain.parallel.collectives import AxisGroup
from meshtrain.parallel.cross_entropy import losses_and_gradient
from meshtrain.parallel.linear import Linear
from meshtrain.parallel.linear.matmul import linear_forward, linear_input_grad, linear_weight_grad_into
from meshtrain.parallel.linear.weight_grad import add_or_compute, write_grad
from meshtrain.parallel.sharding import chunk_range
from meshtrain.parallel.tensor_parallel import ColumnParallelLinear
from meshtrain.parallel.torch_private import backward_is_running, has_gradient_hooks, parameter_of, raise_unless
from meshtrain.parallel.tp_linear import flatten_tokens

CHUNK_TOKENS = 2048  # of a chunk: enough rows for products at full speed
CHUNK_LOGITS = 2**24  # it has more tokens while their logits are not more than this, so small ones are not cut
Thunk = Callable[[], Tensor]
Needs = tuple[bool, bool]  # a gradient of x, of the weight
CHANGED = (
    "the model's forward computes something of the logits that it did not on the meta device, where it was looked at "
    "without what its blocks compute: make that depend on the model's keys and `training` alone, outside of blocks"
)


class WeightGradSum:
    """The gradient of the weight, over microbatches of a step whose forwards have run: the last backward gets it. So
    nothing is where a forward without its backward could spoil it: a step that is given up takes its sum with it."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self._forwards = 0  # whose backwards have not run

    def put(self, total: Tensor | None) -> None:
        self.total = total
        self._forwards += 1

    def take(self) -> Tensor | None:
        self._forwards -= 1
        if self._forwards:
            return None
        total, self.total = self.total, None
        return total


class LossRequest:
    """What the next forward's logits are for: their loss. A `LossHead` in the model computes that in their place.

    Attributes:
        output: what the head has given, and so the model has to give: the scalar whose backward is run, the sum of the
            losses times the factor. None: the model has no such head, and gives logits.
        losses: of each sample, (b,), without a gradient.
    """

    def __init__(self, targets: Thunk, factor: Thunk | None = None, weight_grad: WeightGradSum | None = None) -> None:
        """`targets`: (b, s), IGNORE where there is no loss. `factor`: of the sum, on the device; None: no gradient.
        `weight_grad`: of a step, in which forwards may run before backwards; None: of this forward alone."""
        self.targets, self.factor, self.weight_grad = targets, factor, weight_grad or WeightGradSum()
        self.output: Tensor | None = None
        self.losses: Tensor | None = None
        self.version = 0  # of the output, which a hook could change in place

    def losses_of(self, output: Tensor) -> Tensor | None:
        """The losses, if the model's head has computed them. Raises RuntimeError: the model has changed its output."""
        if self.output is not None and (output is not self.output or output._version != self.version):
            raise RuntimeError(CHANGED)
        return self.losses


_request: LossRequest | None = None


@contextmanager
def request_loss(request: LossRequest) -> Iterator[LossRequest]:
    """A forward inside gives the loss, if its model has a `LossHead`."""
    global _request  # noqa: PLW0603
    before, _request = _request, request
    try:
        yield request
    finally:
        _request = before


def fuse_loss(layer: nn.Module, compiled: bool) -> None:
    """From now on a model's last layer, one of `can_fuse`, gives the loss wherever it is requested."""
    layer.forward = LossHead(layer, compiled)


def can_fuse(layer: nn.Module) -> bool:
    """Whether a layer, plain or split over `tp`, is nothing but a product that gives logits."""
    if "forward" in vars(layer):  # one of the model's own
        return False
    if isinstance(layer, ColumnParallelLinear):
        return layer.bias is None and layer.heads is None and not layer.use_local_output
    return type(layer) in (nn.Linear, Linear) and layer.bias is None


def gives_logits(model: nn.Module, layer: nn.Module, inputs: tuple[Tensor | None, ...]) -> bool:
    """Whether a plain model's output is that of its last layer, for each token, and nothing else is computed from it.

    `model` and `inputs` are on the meta device; False if the model does not run there."""
    for training in (True, False):
        watch = _Watch()
        hook = layer.register_forward_hook(watch.take, prepend=True)  # before hooks that the model has there
        try:
            with torch.set_grad_enabled(training), watch:
                output = model.train(training)(*inputs)
        except Exception:  # whatever a model raises that asks a tensor for its values
            return False
        finally:
            hook.remove()
        if len(watch.outputs) != 1 or watch.used or output is not watch.outputs[0]:
            return False
        if output._backward_hooks or output.shape[:-1] != inputs[0].shape:  # type: ignore[union-attr]
            return False
    return True


class _Watch(TorchDispatchMode):
    """Whether any operator gets what a layer has given."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []
        self.used = False

    def take(self, layer: nn.Module, inputs: Any, output: Tensor) -> None:
        self.outputs.append(output)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs))
        self.used |= any(leaf is output for leaf in leaves for output in self.outputs)
        return func(*args, **(kwargs or {}))


class LossHead:
    """The forward of a model's last layer: logits, or where it is requested their loss."""

    def __init__(self, layer: Any, compiled: bool) -> None:
        self.layer, self.logits = layer, layer.forward
        self.axis: AxisGroup | None = layer.axis_group if isinstance(layer, ColumnParallelLinear) else None
        self.sequence = self.axis is not None and layer.sequence_parallel
        # Static shapes: there are two, that of a chunk and that of a shorter last one.
        self.softmax = torch.compile(losses_and_gradient, dynamic=False) if compiled else losses_and_gradient

    def __call__(self, input: Tensor) -> Tensor:  # as torch calls it
        request = _request
        if request is None:
            return self.logits(input)
        if request.output is not None and not backward_is_running():  # which computes a block again
            raise RuntimeError(CHANGED)
        weight = self.layer.weight if self.axis is None else self.layer.rows_of(self.layer.weight)
        targets, dim = request.targets(), 0 if self.sequence else 1  # of the losses, along the sequence
        targets = targets.t() if self.sequence else targets
        arguments = flatten_tokens(input, self.sequence), weight, targets.reshape(-1)
        if request.factor is None:
            losses, _, _ = self.compute(*arguments, None, (False, False), None)
            output = losses.sum()
        else:
            # Of a checkpoint around the head, whose first forward's is in the sum, and for a hook, which sees each.
            alone = backward_is_running() or has_gradient_hooks(parameter_of(weight))
            weight_grad = WeightGradSum() if alone else request.weight_grad
            output, losses = LinearCrossEntropy.apply(*arguments, request.factor(), self, weight_grad)
        request.output, request.losses, request.version = output, losses.view(targets.shape).sum(dim), output._version
        return output

    def compute(
        self, x: Tensor, weight: Tensor, targets: Tensor, factor: Tensor | None, needs: Needs, dw: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The losses (n,) of tokens x (n, d), or with sequence parallelism (n/t, d), and the gradients of x and of the
        weight, added to `dw`, so far as `needs` says; none without a factor."""
        axis, first, rows = self.axis, 0, self.layer.out_features
        if axis is not None:
            first = chunk_range(rows, axis.size, axis.index).start
            rows = chunk_range(rows, axis.size, 0).stop  # of the rank with most: all have the same chunks
        whole = axis.start_all_gather(x.contiguous()).wait() if axis is not None and self.sequence else x
        size = max(CHUNK_TOKENS, CHUNK_LOGITS // rows)
        chunks = list(zip(whole.split(size), targets.split(size), strict=True))
        losses: list[Tensor] = []
        parts: list[Tensor] = []
        dx: Callable[[], Tensor] | None = None
        for inputs, words in chunks:
            logits = linear_forward(inputs, weight)
            of_tokens, grad = self.softmax(logits, words, factor, first, None if axis is None else axis.name)
            losses.append(of_tokens)
            if grad is not None and needs[0]:
                parts.append(linear_input_grad(grad, weight))
                dx = self._start_sum(parts) if len(parts) == len(chunks) else None  # beside the last weight product
            if grad is not None and needs[1]:
                dw = _add_weight_grad(grad, inputs, dw)
            del logits, grad  # or there would be two
        return _cat(losses), None if dx is None else dx(), dw

    def _start_sum(self, parts: Sequence[Tensor]) -> Callable[[], Tensor]:
        """The gradient of the input, once it is there: over `tp` the sum of the ranks' ones."""
        dx = _cat(parts)
        if self.axis is None:
            return lambda: dx
        return (self.axis.start_reduce_scatter(dx) if self.sequence else self.axis.start_all_reduce(dx)).wait


def _add_weight_grad(grad: Tensor, x: Tensor, total: Tensor | None) -> Tensor:
    """The sum over chunks and microbatches, in float32 at least."""
    add = total is not None
    if total is None:
        total = grad.new_empty(grad.shape[1], x.shape[1], dtype=torch.promote_types(grad.dtype, torch.float32))
    linear_weight_grad_into(grad, x, total, add)
    return total


def _cat(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


class LinearCrossEntropy(torch.autograd.Function):
    """x (n, d), a weight (v, d) -> the sum of the losses times the factor, and the losses (n,) without a gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, factor: Tensor, head: LossHead, weight_grad: WeightGradSum
    ) -> tuple[Tensor, Tensor]:
        factor = factor.to(torch.promote_types(x.dtype, torch.float32))
        needs = ctx.needs_input_grad[:2]
        losses, dx, dw = head.compute(x, weight, targets, factor, needs, weight_grad.total)
        weight_grad.put(dw)
        ctx.save_for_backward(dx)
        ctx.weight_grad, ctx.dtype = weight_grad, weight.dtype
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(losses)
        return losses.sum() * factor, losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        raise_unless(grad == 1, "gradients are made in the forward: run the backward of what the model gives itself")
        if ctx.weight_grad is None:
            raise RuntimeError("the backward of a loss without logits runs once")
        (dx,), dw = ctx.saved_tensors, ctx.weight_grad.take()
        ctx.weight_grad = None
        if dw is not None and dw.dtype != ctx.dtype:  # the sum of a parameter in float32 takes it as it is
            dw = add_or_compute(ctx.next_functions[1][0], partial(dw.to, ctx.dtype), partial(write_grad, dw))
        return dx, dw, None, None, None, None
