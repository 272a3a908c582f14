"""The mistakes of errors.yaml, planted in this code: each by its name, on every rank of a run.

A mistake stays as close to the one that others had as there is a place for it here.
"""

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import meshtrain.checkpoint.resume
import meshtrain.checkpoint.state
import meshtrain.experts
import meshtrain.loss
import meshtrain.modeling.init
import meshtrain.modeling.loss_trial
import meshtrain.optim.matrix_exchange
import meshtrain.optim.optimizer
import meshtrain.parallel.collectives
import meshtrain.parallel.context.kernels
import meshtrain.parallel.cross_entropy
import meshtrain.parallel.gather_samples
import meshtrain.parallel.grad_sync
import meshtrain.parallel.linear_cross_entropy
import meshtrain.parallel.tensor_parallel
import meshtrain.parallel.verify.refusals
import meshtrain.pipeline.engine
import meshtrain.pipeline.tied
import meshtrain.step_terms
import meshtrain.train
import meshtrain.trainer
from meshtrain.attention import AttentionContext
from meshtrain.data.batch import IGNORE, Batch
from meshtrain.dropout import Dropout, SequencePart
from meshtrain.loss import GlobalCount, StepTerms
from meshtrain.mesh import Mesh
from meshtrain.optim.grad_norm import LocalParameter
from meshtrain.optim.optimizer import Optimizer
from meshtrain.parallel.context import ContextParallel, ShardedContext
from meshtrain.parallel.cross_entropy import VocabParallelCrossEntropy
from meshtrain.parallel.sharding import ParameterSpec
from meshtrain.parallel.tensor_parallel import RowParallelLinear
from meshtrain.parallel.torch_private import backward_is_running, to_local
from meshtrain.pipeline.actions import Action, Kind
from meshtrain.pipeline.engine import Pipeline
from meshtrain.trainer import Trainer

Patch = pytest.MonkeyPatch
MISTAKES: dict[str, Callable[[Patch], None]] = {}


def mistake(*names: str) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    def register(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
        MISTAKES.update(dict.fromkeys(names, plant))
        return plant

    return register


def _around(patch: Patch, owner: Any, name: str, changed: Callable[..., Any]) -> None:
    """Puts `changed` in the place of a function, which it gets as its first argument."""
    plain = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **named: changed(plain, *args, **named))


# The division of the loss -------------------------------------------------------------------------


@mistake("means of ranks", "means of parts")
def _(patch: Patch) -> None:
    def begin(plain: Any, self: Any, count: float, mesh: Mesh, device: torch.device) -> None:
        plain(self, count, mesh, device)
        self.wait()
        ranks = mesh.size("dp_replicate", "dp_shard", "cp")
        self._total = torch.full_like(self._total, count * ranks)

    _around(patch, GlobalCount, "__init__", begin)


@mistake("mean of a sum")
def _(patch: Patch) -> None:
    _around(patch, Trainer, "_factor", lambda plain, self: plain(self) / dist.get_world_size())


@mistake("means of microbatches")
def _(patch: Patch) -> None:
    def factor(plain: Any, self: Trainer) -> Tensor:
        now = self._step
        assert now.on_device is not None
        _, batch = now.on_device
        own = max(self.objective.counts(batch).targets, 1)
        return torch.full_like(plain(self), 1 / (own * len(now.batches) * dist.get_world_size()))

    _around(patch, Trainer, "_factor", factor)


@mistake("counted by all ranks")
def _(patch: Patch) -> None:
    def begin(plain: Any, self: Any, count: float, mesh: Mesh, device: torch.device) -> None:
        plain(self, count, mesh, device)
        self.wait()
        self._total = self._total * mesh.size("tp")

    _around(patch, GlobalCount, "__init__", begin)


@mistake("microbatches not divided")
def _(patch: Patch) -> None:
    _around(patch, Trainer, "_factor", lambda plain, self: plain(self) * len(self._step.batches))


@mistake("evaluation of means")
def _(patch: Patch) -> None:
    def total(plain: Any, self: Mesh, tensor: Tensor) -> Tensor:
        if sys._getframe(2).f_code.co_name == "evaluate":
            # (sum of losses, weight, ...) of this rank
            tensor[:2] = torch.stack([tensor[0] / tensor[1], torch.ones_like(tensor[1])])
        return plain(self, tensor)

    _around(patch, Mesh, "sum", total)


@mistake("divided after the backward")
def _(patch: Patch) -> None:
    _around(patch, Trainer, "_factor", lambda plain, self: torch.ones_like(plain(self)))


# Pipelines ----------------------------------------------------------------------------------------


@mistake("divided by each stage")
def _(patch: Patch) -> None:
    def backward(plain: Any, self: Pipeline, action: Action, stage: Any, grads: Any) -> None:
        if grads is not None:
            grads = [grad / self.schedule.microbatches for grad in grads]
        plain(self, action, stage, grads)

    _around(patch, Pipeline, "_backward", backward)


@mistake("gradients wiped between microbatches")
def _(patch: Patch) -> None:
    def act(plain: Any, self: Pipeline, action: Action, stage: Any, *more: Any) -> None:
        is_last = action.microbatch == self.schedule.microbatches - 1
        if is_last and action.kind is Kind.FORWARD:
            for parameter in stage.parameters():
                parameter.grad = None
        plain(self, action, stage, *more)

    _around(patch, Pipeline, "_act", act)


@mistake("documents stay on the first stage")
def _(patch: Patch) -> None:
    def attend(plain: Any, self: AttentionContext, *args: Any) -> Tensor:
        if dist.get_rank() > 0:
            self = replace(self, documents=None, lengths=None, mask=None)
        return plain(self, *args)

    _around(patch, AttentionContext, "attend", attend)


@mistake("chunks begin alike")
def _(patch: Patch) -> None:
    def generator(plain: Any, *key: object) -> torch.Generator:
        return plain(
            *(re.sub(r"\d+", "0", part) if isinstance(part, str) else part for part in key)
        )

    _around(patch, meshtrain.modeling.init, "generator", generator)


@mistake("tied weights counted twice")
def _(patch: Patch) -> None:
    _around(
        patch,
        ParameterSpec,
        "copies",
        lambda plain, self, layout: plain(self, layout) // len(self.stages),
    )


@mistake("tied gradients apart")
def _(patch: Patch) -> None:
    patch.setattr(meshtrain.pipeline.tied.TiedGradients, "sum", lambda self: None)


# Tensor parallelism -------------------------------------------------------------------------------


@mistake("bias of each rank")
def _(patch: Patch) -> None:
    def forward(plain: Any, self: RowParallelLinear, input: Tensor) -> Tensor:
        y = plain(self, input)
        return y if self.bias is None else y + (self.axis_group.size - 1) * to_local(self.bias)

    _around(patch, RowParallelLinear, "forward", forward)


@mistake("partial gradients of norms")
def _(patch: Patch) -> None:
    patch.setattr(meshtrain.parallel.grad_sync.TPGradSync, "finish_reduce", lambda self: None)


def _sum_all_but(patch: Patch, part: str) -> None:
    """Leaves out the sums over tp of gradients of modules whose name matches a pattern."""

    def begin(plain: Any, self: Any, model: Any, parameters: Sequence[Any], group: Any) -> None:
        names = {module: name for name, module in model.named_modules()}
        kept = [pair for pair in parameters if not re.search(part, names[pair[0]])]
        assert len(kept) < len(parameters)
        plain(self, model, kept, group)

    _around(patch, meshtrain.parallel.grad_sync.TPGradSync, "__init__", begin)


@mistake("replicas drift")
def _(patch: Patch) -> None:
    _sum_all_but(patch, "[qk]_norm$")


@mistake("adapters of a part")
def _(patch: Patch) -> None:
    _sum_all_but(patch, "lora_[AB]$")


@mistake("replicated counted per rank")
def _(patch: Patch) -> None:
    def copies(plain: Any, self: ParameterSpec, layout: Any) -> int:
        is_split = any(cut.axis == "tp" for cut in self.cuts)
        return plain(self, layout) // (1 if is_split else layout.size("tp"))

    _around(patch, ParameterSpec, "copies", copies)


def _norm_without(patch: Patch, is_left_out: Callable[[LocalParameter], bool]) -> None:
    def squared(plain: Any, parameters: Sequence[LocalParameter], device: torch.device) -> Tensor:
        counted = [p for p in parameters if not is_left_out(p)]
        for parameter in parameters:
            parameter.take_grad()
        return plain(counted, device)

    _around(patch, meshtrain.optim.optimizer, "squared_norm", squared)


@mistake("sinks left out of the norm")
def _(patch: Patch) -> None:
    _norm_without(patch, lambda p: p.spec.name.endswith("sinks") and p.part[0].start > 0)


@mistake("smoothing over a part")
def _(patch: Patch) -> None:
    def losses(plain: Any, logits: Tensor, *args: Any, vocabulary: int, **named: Any) -> Any:
        return plain(logits, *args, vocabulary=logits.shape[1], **named)

    for module in (meshtrain.parallel.cross_entropy, meshtrain.parallel.linear_cross_entropy):
        _around(patch, module, "losses_and_gradient", losses)


@mistake("gathered logits summed again")
def _(patch: Patch) -> None:
    def over_ranks(plain: Any, *args: Any) -> tuple[Tensor, ...]:
        largest, total, wanted = plain(*args)
        return largest, total * 2, wanted

    _around(patch, meshtrain.parallel.cross_entropy, "_over_ranks", over_ranks)


@mistake("identity for log-softmax")
def _(patch: Patch) -> None:
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        gradient, _ = ctx.saved_tensors  # softmax - one-hot, which alone is below 0
        return -(gradient < 0).to(gradient.dtype) * grad[:, None], None, None, None, None

    patch.setattr(VocabParallelCrossEntropy, "backward", staticmethod(backward))


@mistake("one mask for all parts")
def _(patch: Patch) -> None:
    _around(
        patch,
        SequencePart,
        "positions",
        lambda plain, self, rows, device: torch.arange(rows, device=device),
    )


@mistake("new masks in recomputation")
def _(patch: Patch) -> None:
    def keys(plain: Any, self: Dropout, samples: int) -> Tensor:
        found = plain(self, samples)
        return found ^ 1 if backward_is_running() else found

    _around(patch, Dropout, "keys_of", keys)


# Context parallelism ------------------------------------------------------------------------------


def _attend(patch: Patch, changed: Callable[[Any, Any], tuple[Any, Any]]) -> None:
    """Changes the context and the options of attention over parts of sequences."""

    def attend(
        plain: Any, self: ShardedContext, q: Tensor, k: Tensor, v: Tensor, options: Any
    ) -> Tensor:
        context, options = changed(self, options)
        return plain(context, q, k, v, options)

    _around(patch, ShardedContext, "attend", attend)


@mistake("window becomes causal")
def _(patch: Patch) -> None:
    _attend(patch, lambda context, options: (context, options._replace(window=None)))


@mistake("sinks dropped")
def _(patch: Patch) -> None:
    _attend(patch, lambda context, options: (context, options._replace(sinks=None)))


@mistake("documents see each other")
def _(patch: Patch) -> None:
    def without(context: ShardedContext, options: Any) -> tuple[Any, Any]:
        assert context.spans is not None
        return replace(context, documents=None, spans=torch.zeros_like(context.spans)), options

    _attend(patch, without)


def _shard(patch: Patch, changed: Callable[[Batch, int], Batch]) -> None:
    """Changes the part of a batch that a rank has; the number is the length of the whole."""

    def shard(plain: Any, self: ContextParallel, batch: Batch) -> Batch:
        shape = batch.sequence_shape()
        assert shape is not None
        return changed(plain(self, batch), shape[1])

    _around(patch, ContextParallel, "shard", shard)


def _without_targets(batch: Batch, places: Any) -> Batch:
    targets: Any = batch.targets.clone()
    targets[:, places] = IGNORE
    return replace(batch, targets=targets)


@mistake("last token of an odd length")
def _(patch: Patch) -> None:
    def changed(batch: Batch, length: int) -> Batch:
        part = batch.tensors["documents"].part
        return _without_targets(batch, (part >= length // 2 * 2).nonzero().flatten())

    _shard(patch, changed)


@mistake("labels shifted by part")
def _(patch: Patch) -> None:
    _shard(patch, lambda batch, length: _without_targets(batch, -1))


@mistake("positions of a part")
def _(patch: Patch) -> None:
    def changed(batch: Batch, length: int) -> Batch:
        positions = batch.tensors["positions"]
        local = torch.arange(positions.shape[1]).expand_as(positions).contiguous()
        return replace(batch, tensors=dict(batch.tensors) | {"positions": local})

    _shard(patch, changed)


@mistake("gradients of attention")
def _(patch: Patch) -> None:
    def backward(plain: Any, *args: Any) -> list[Tensor]:
        of_queries, *others = plain(*args)
        return [of_queries / 2, *others]

    _around(patch, meshtrain.parallel.context.kernels, "backward_block", backward)


# Experts ------------------------------------------------------------------------------------------


def _attached(patch: Patch, times: float) -> None:
    """Multiplies the gradient of attached terms."""

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, times * ctx.factor().to(ctx.dtype), None

    patch.setattr(meshtrain.loss._Attach, "backward", staticmethod(backward))


@mistake("balance per microbatch")
def _(patch: Patch) -> None:
    _attached(patch, 3)


@mistake("balance by data ranks", "balance by tensor ranks")
def _(patch: Patch) -> None:
    _attached(patch, 1 / 2)


@mistake("balance without a gradient")
def _(patch: Patch) -> None:
    _attached(patch, 0)


@mistake("terms not divided")
def _(patch: Patch) -> None:
    _around(patch, StepTerms, "factor", lambda plain, self: torch.ones_like(plain(self)))


@mistake("loads of one part")
def _(patch: Patch) -> None:
    def addends(plain: Any, self: Any, *args: Any) -> dict[Any, Tensor]:
        sums = plain(self, *args)
        if self._mesh.index("tp") == 0:
            return sums
        return {
            field: torch.zeros_like(values) if field.kind == "expert_loads" else values
            for field, values in sums.items()
        }

    _around(patch, meshtrain.step_terms.TermSums, "addends", addends)


@mistake("router gradient of own experts")
def _(patch: Patch) -> None:
    def run(plain: Any, module: Any, x: Tensor, chosen: Tensor, weights: Tensor, *more: Any) -> Any:
        group = module.dispatch.axis_group
        own = chosen * group.size // module.num_experts == group.index
        weights = torch.where(own, weights, weights.detach())
        return plain(module, x, chosen, weights, *more)

    _around(patch, meshtrain.experts, "run_experts", run)


def _is_expert(parameter: LocalParameter) -> bool:
    return any(cut.axis == "ep" for cut in parameter.spec.cuts)


@mistake("expert gradients times ep")
def _(patch: Patch) -> None:
    def squared(plain: Any, self: Optimizer) -> Tensor:
        for parameter in self._parameters:
            if _is_expert(parameter):
                parameter.parameter.grad.mul_(2)  # type: ignore[union-attr]
        return plain(self)

    _around(patch, Optimizer, "squared_norm", squared)


@mistake("experts left out of the norm")
def _(patch: Patch) -> None:
    _norm_without(patch, lambda p: _is_expert(p) and p.part[0].start > 0)


@mistake("norms of experts averaged")
def _(patch: Patch) -> None:
    def squared(plain: Any, parameters: Sequence[LocalParameter], device: torch.device) -> Tensor:
        experts = plain([p for p in parameters if _is_expert(p)], device)
        others = plain([p for p in parameters if not _is_expert(p)], device)
        mean = experts.sqrt() / dist.get_world_size()
        dist.all_reduce(mean)
        return others + mean.square() / dist.get_world_size()

    _around(patch, meshtrain.optim.optimizer, "squared_norm", squared)


@mistake("a norm of each group")
def _(patch: Patch) -> None:
    def reduce(plain: Any, self: Trainer, stop_asked: bool) -> tuple[Tensor, Any]:
        losses, sums = plain(self, stop_asked)
        own = self.optimizer.squared_norm() * dist.get_world_size()
        return losses, replace(sums, squared_norm=own)

    _around(patch, Trainer, "_reduce", reduce)


# Optimizers and resuming --------------------------------------------------------------------------


@mistake("matrices of a part")
def _(patch: Patch) -> None:
    def apply(plain: Any, self: Any, function: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [function(tensor[None])[0] for tensor in tensors]

    _around(patch, meshtrain.optim.matrix_exchange.MatrixExchange, "apply", apply)


@mistake("weights in the gradients' memory")
def _(patch: Patch) -> None:
    def zero(plain: Any, self: Optimizer) -> None:
        plain(self)
        for parameter in self._parameters:
            parameter.parameter.grad = parameter.parameter.detach().clone()

    _around(patch, Optimizer, "zero_grad", zero)


@mistake("moments lost on resume")
def _(patch: Patch) -> None:
    def loaded(plain: Any, self: Any) -> None:
        plain(self)
        for parameter in self._optimizer._parameters:
            for state in parameter.state.values():
                state.zero_()

    _around(patch, meshtrain.checkpoint.state.State, "loaded", loaded)


@mistake("weights of a part on resume")
def _(patch: Patch) -> None:
    patch.setattr(meshtrain.checkpoint.resume, "exchange", lambda state: state.loaded())


@mistake("data from the beginning")
def _(patch: Patch) -> None:
    def readers(plain: Any, *args: Any, first_step: int, **named: Any) -> Any:
        return plain(*args, first_step=0, **named)

    _around(patch, meshtrain.train, "readers", readers)


# Samples that meet each other ---------------------------------------------------------------------


@mistake("negatives of one rank")
def _(patch: Patch) -> None:
    patch.setattr(meshtrain.modeling.loss_trial, "several_microbatches", lambda *_: None)
    patch.setattr(meshtrain.trainer, "several_microbatches", lambda *_: None)
    patch.setattr(meshtrain.parallel.gather_samples, "_shares", lambda: None)


@mistake("statistics of one rank")
def _(patch: Patch) -> None:
    patch.setattr(meshtrain.parallel.verify.refusals, "_has_batch_statistics", lambda *_: False)
