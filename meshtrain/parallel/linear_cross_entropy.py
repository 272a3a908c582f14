"""The loss without logits: a model's last linear layer fused with the cross entropy, one chunk of
tokens at a time.

The logits of all tokens are the largest tensor of a step, and their gradient is as large. Here a
chunk's logits are reduced to losses and overwritten by their gradient, from which the gradients of
the layer's input and weight are computed at once, in the forward (as in Liger Kernel,
https://arxiv.org/abs/2410.10989). They are kept until the backward, which only returns them: the
weight's as one sum over all microbatches in flight. So a pipeline schedule that splits backwards
does not defer the gradient of this weight.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshtrain.parallel.collectives import AxisGroup
from meshtrain.parallel.cross_entropy import (
    CROSS_ENTROPY,
    LossOptions,
    losses_and_gradient,
    refuse_unknown,
)
from meshtrain.parallel.linear import Linear
from meshtrain.parallel.linear.matmul import (
    linear_forward,
    linear_input_grad,
    linear_weight_grad_into,
)
from meshtrain.parallel.linear.weight_grad import add_or_compute, noticed, write_grad
from meshtrain.parallel.sharding import chunk_range
from meshtrain.parallel.step_context import current_context, use_context
from meshtrain.parallel.tensor_parallel import ColumnParallelLinear
from meshtrain.parallel.torch_private import (
    backward_is_running,
    has_gradient_hooks,
    parameter_of,
    raise_unless,
)
from meshtrain.parallel.tp_linear import flatten_tokens

CHUNK_TOKENS = 2048  # minimum tokens per chunk: enough rows for products at full speed
# a chunk has more tokens as long as it has at most this many logits, so small ones are not split
CHUNK_LOGITS = 2**24

Thunk = Callable[[], Tensor]
Needs = tuple[bool, bool]  # whether x, the weight need a gradient
CHANGED = (
    "the model's forward computes something of the logits that it did not on the meta device, "
    "where it was looked at without what its blocks compute: make that depend on the model's keys "
    "and `training` alone, outside of blocks"
)


class WeightGradSum:
    """The weight's gradient, summed over microbatches of a step whose forwards have run; the last
    backward returns it. It belongs to one step, so an abandoned step, with a forward without
    backward, discards its sum."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self._forwards = 0  # forwards whose backwards have not run

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
    """Asks the next forward for the loss. A `LossHead` in the model computes it instead of logits.

    Attributes:
        output: the output of the head, which the model has to return unchanged: the scalar to run
            backward from, the sum of the losses times the factor. None: the model has no such head,
            and returns logits.
        losses: the loss of each sample, (b,), without gradient.
    """

    def __init__(
        self,
        targets: Thunk,
        factor: Thunk | None = None,
        weight_grad: WeightGradSum | None = None,
        options: LossOptions = CROSS_ENTROPY,
    ) -> None:
        """`targets`: (b, s), IGNORE where there is no loss. `factor`: of the sum, on the device;
        None: no gradient. `weight_grad`: that of a step, in which several forwards may precede
        backwards; None: for this forward alone. `options`: of the loss."""
        # Functions, because only the last stage needs targets on the device, and because the factor
        # waits for an all-reduce, which the blocks before the head hide.
        self.targets = targets
        self.factor = factor
        self.weight_grad = weight_grad or WeightGradSum()
        self.options = options
        self.output: Tensor | None = None
        self.losses: Tensor | None = None
        self._version = 0  # of the output, to detect in-place changes

    def answer(self, output: Tensor, losses: Tensor) -> None:
        self.output = output
        self.losses = losses
        self._version = output._version

    def losses_of(self, output: Tensor) -> Tensor | None:
        """The losses, if the model's head has computed them. Raises RuntimeError: the model changed
        its output."""
        if self.output is None:
            return None
        if output is not self.output or output._version != self._version:
            raise RuntimeError(CHANGED)
        return self.losses


@contextmanager
def request_loss(request: LossRequest) -> Iterator[LossRequest]:
    """A forward inside returns the loss, if its model has a `LossHead`."""
    with use_context(replace(current_context(), loss_request=request)):
        yield request


def fuse_loss(layer: nn.Module, compiled: bool) -> None:
    """Makes a model's last layer, for which `can_fuse` holds, return the loss whenever it is
    requested."""
    layer.forward = LossHead(layer, compiled)


def can_fuse(layer: nn.Module) -> bool:
    """Whether a layer, plain or split over `tp`, only multiplies by a weight to produce logits."""
    if "forward" in vars(layer):  # the model's own forward
        return False
    if isinstance(layer, ColumnParallelLinear):
        has_logits = layer.gather_output or not layer.use_local_output
        return layer.bias is None and layer.uses_own_rows and has_logits
    return type(layer) in (nn.Linear, Linear) and layer.bias is None


class LossHead:
    """The forward of a model's last layer: returns logits, or the loss if it is requested."""

    def __init__(self, layer: Any, compiled: bool) -> None:
        self.layer = layer
        self.logits = layer.forward
        self.axis: AxisGroup | None = None  # over which the vocabulary is split
        if isinstance(layer, ColumnParallelLinear):
            self.axis = layer.axis_group
        self.sequence = self.axis is not None and layer.sequence_parallel
        self.softmax = losses_and_gradient
        if compiled:
            # Static shapes: there are only two, that of a chunk and that of a shorter last chunk.
            self.softmax = torch.compile(losses_and_gradient, dynamic=False)

    def __call__(self, input: Tensor) -> Tensor:  # named as in torch
        request = current_context().loss_request
        if request is None:
            return self.logits(input)
        recomputed = backward_is_running()
        if request.output is not None and not recomputed:
            raise RuntimeError(CHANGED)  # a second call in the same forward

        weight = self.layer.weight if self.axis is None else self.layer.rows_of(self.layer.weight)
        targets = request.targets()
        sequence_dim = 1
        if self.sequence:  # its tokens are (s, b): a rank's part of the sequence is in one piece
            targets = targets.t()
            sequence_dim = 0
        x = flatten_tokens(input, self.sequence)
        words = targets.reshape(-1)

        if request.factor is None:
            losses, _, _ = self.compute(
                x,
                weight,
                words,
                factor=None,
                needs=(False, False),
                weight_grad=None,
                options=request.options,
            )
            output = losses.sum()
        else:
            # A recomputation must not add to the sum again, in which its first forward already is,
            # and hooks on the weight see the gradient of each forward.
            alone = recomputed or has_gradient_hooks(parameter_of(weight))
            weight_grad = WeightGradSum() if alone else request.weight_grad
            output, losses = LinearCrossEntropy.apply(
                x, weight, words, request.factor(), self, weight_grad, request.options
            )
        request.answer(output, losses.view(targets.shape).sum(sequence_dim))
        return output

    def compute(
        self,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        *,
        factor: Tensor | None,
        needs: Needs,
        weight_grad: Tensor | None,
        options: LossOptions,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The losses of tokens, and the gradients of x and of the weight, each if `needs` says so;
        none without a factor.

            logits = x W^T,   d = (softmax(logits) - one-hot) * factor,   dx = d W,   dW = d^T x

        d is that of the cross entropy; `losses_and_gradient` has it with the options.

        Args:
            x: (n, d), or with sequence parallelism (n/t, d), which is gathered.
            weight: (v, d), or this rank's rows (v/t, d).
            targets: (n,).
            weight_grad: the sum to which that of the weight is added; None: a new one.

        Returns:
            (n,); the gradient of x in its shape; that of the weight, in float32 or wider.
        """
        first, chunk_tokens = self._vocabulary_part(targets)
        group = None if self.axis is None else self.axis.name
        tokens = self._gathered(x)
        chunks = list(zip(tokens.split(chunk_tokens), targets.split(chunk_tokens), strict=True))
        losses: list[Tensor] = []
        input_grads: list[Tensor] = []
        input_grad: Callable[[], Tensor] | None = None
        for inputs, words in chunks:
            logits = linear_forward(inputs, weight)
            of_tokens, grad = self.softmax(
                logits,
                words,
                factor,
                first,
                group,
                vocabulary=self.layer.out_features,
                label_smoothing=options.label_smoothing,
                z_loss=options.z_loss,
            )
            losses.append(of_tokens)
            if grad is not None and needs[0]:
                input_grads.append(linear_input_grad(grad, weight))
                if len(input_grads) == len(chunks):
                    # Its sum over ranks overlaps with the last product of the weight's gradient.
                    input_grad = self._start_sum(input_grads)
            if grad is not None and needs[1]:
                weight_grad = _add_weight_grad(grad, inputs, weight_grad)
            del logits, grad  # otherwise two chunks would be in memory
        return _cat(losses), None if input_grad is None else input_grad(), weight_grad

    def _vocabulary_part(self, targets: Tensor) -> tuple[int, int]:
        """The first token id of this rank's part of the vocabulary, and the tokens of a chunk, of
        which all ranks have the same number."""
        vocabulary = self.layer.out_features
        first, rows = 0, vocabulary
        if self.axis is not None:
            refuse_unknown(targets, vocabulary)
            first = chunk_range(vocabulary, self.axis.size, self.axis.index).start
            rows = chunk_range(vocabulary, self.axis.size, 0).stop  # of the rank with the most
        return first, max(CHUNK_TOKENS, CHUNK_LOGITS // rows)

    def _gathered(self, x: Tensor) -> Tensor:
        if self.axis is None or not self.sequence:
            return x
        return self.axis.start_all_gather(x.contiguous()).wait()

    def _start_sum(self, parts: Sequence[Tensor]) -> Callable[[], Tensor]:
        """Starts the sum of the input's gradient over `tp`; the returned function waits for it."""
        input_grad = _cat(parts)
        if self.axis is None:
            return lambda: input_grad
        if self.sequence:
            return self.axis.start_reduce_scatter(input_grad).wait
        return self.axis.start_all_reduce(input_grad).wait


def _add_weight_grad(grad: Tensor, x: Tensor, total: Tensor | None) -> Tensor:
    """Accumulates over chunks and microbatches, in float32 or wider."""
    accumulate = total is not None
    with noticed():
        if total is None:
            wide = torch.promote_types(grad.dtype, torch.float32)
            total = grad.new_empty(grad.shape[1], x.shape[1], dtype=wide)
        linear_weight_grad_into(grad, x, total, accumulate)
    return total


def _cat(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


class LinearCrossEntropy(torch.autograd.Function):
    """x (n, d), a weight (v, d) -> the sum of the losses times the factor, and the losses (n,)
    without a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        factor: Tensor,
        head: LossHead,
        weight_grad: WeightGradSum,
        options: LossOptions,
    ) -> tuple[Tensor, Tensor]:
        factor = factor.to(torch.promote_types(x.dtype, torch.float32))
        losses, dx, dw = head.compute(
            x,
            weight,
            targets,
            factor=factor,
            needs=ctx.needs_input_grad[:2],
            weight_grad=weight_grad.total,
            options=options,
        )
        weight_grad.put(dw)
        ctx.save_for_backward(dx)
        ctx.weight_grad = weight_grad
        ctx.dtype = weight.dtype
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(losses)
        return losses.sum() * factor, losses

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor, _: None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None, None]:
        raise_unless(
            grad == 1,
            "gradients are made in the forward: run the backward of what the model gives itself",
        )
        if ctx.weight_grad is None:
            raise RuntimeError("the backward of a loss without logits runs once")
        (dx,) = ctx.saved_tensors
        dw = ctx.weight_grad.take()
        ctx.weight_grad = None
        if dw is not None and dw.dtype != ctx.dtype:
            # The gradient of a 16-bit copy: that of its float32 parameter takes it uncast, where
            # `linear/weight_grad.py` allows it.
            next_in_graph = ctx.next_functions[1][0]
            dw = add_or_compute(next_in_graph, partial(dw.to, ctx.dtype), partial(write_grad, dw))
        return dx, dw, None, None, None, None, None
