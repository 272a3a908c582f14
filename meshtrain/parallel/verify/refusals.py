"""Refuses modules, parameters and plans of which a layout would change what they compute, by their
kind, names and sizes alone, or by a forward without values."""

from collections.abc import Sequence

from torch import Tensor, nn

from meshtrain.errors import AgreedError, InputError
from meshtrain.parallel.float8_layers import float8_problems
from meshtrain.parallel.mixed_precision import state_parameters
from meshtrain.parallel.sync_batch_norm import SyncBatchNorm, can_sync
from meshtrain.parallel.tensor_parallel import TensorParallel
from meshtrain.parallel.torch_private import (
    AnyBatchNorm,
    AnyDropout,
    AnyNormWithStatistics,
    has_accumulation_hooks,
    has_gradient_hooks,
)
from meshtrain.parallel.tp_plan import REPLICATED, Split, undecided
from meshtrain.parallel.verify.between import parameters_between
from meshtrain.parallel.verify.recording import PlainError


def refuse_uneven_microbatches(
    model: nn.Module, ranks: int, micro_size: int, global_sizes: Sequence[int]
) -> None:
    """A hook on a parameter's gradient acts on that of one microbatch. Rejects microbatches that
    have other samples than on one process, because a step does not divide into whole ones on each
    of so many ranks."""
    hooked = [name for name, p in model.named_parameters() if has_gradient_hooks(p)]
    if not hooked:
        return
    whole = micro_size * ranks
    for size in global_sizes:
        if size % whole:
            raise InputError(
                f"the parameter {hooked[0]} has a hook on its gradient, which acts on that of one "
                f"microbatch, and batch.global_size {size} is no multiple of batch.micro_size "
                f"times the {ranks} data ranks, {whole}: microbatches would have other samples "
                f"than on one process. Use a multiple of {whole}, one data rank, or "
                "optimizer.clip_norm in the place of the hook"
            )


def refuse_batch_statistics(model: nn.Module) -> None:
    """Rejects modules that compute with the samples that a rank happens to have."""
    for name, module in model.named_modules():
        _refuse_embedding_of_tokens_at_hand(name, module)
        if isinstance(module, SyncBatchNorm) or not _has_batch_statistics(module):
            continue
        instead = "a GroupNorm or LayerNorm"
        if can_sync(module):
            instead += ", parallel.sync_batch_norm: true (statistics of all data ranks)"
        raise AgreedError(_depends_on_layout(name, module, instead))


def refuse_statistics_of_parts(model: nn.Module) -> None:
    """Rejects modules that compute with the tokens that a rank of `tp` happens to have: a
    `SyncBatchNorm` too, which knows nothing of parts of sequences."""
    for name, module in model.named_modules():
        _refuse_embedding_of_tokens_at_hand(name, module)
        if _has_batch_statistics(module):
            raise AgreedError(_depends_on_layout(name, module, "a GroupNorm or LayerNorm"))


def _depends_on_layout(name: str, module: nn.Module, instead: str) -> str:
    return (
        f"{name} is a {type(module).__name__}, which computes with the samples that a rank happens "
        "to have: with several data ranks, cp or sequence_parallel the loss would depend on the "
        f"layout. Use {instead}, freeze it with eval(), or use one data rank, cp: 1 and "
        "sequence_parallel: false"
    )


def _refuse_embedding_of_tokens_at_hand(name: str, module: nn.Module) -> None:
    if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, option, None):
            raise AgreedError(
                f"{name} is an embedding with {option}, which goes by the tokens that a rank "
                "happens to have: with several data ranks or cp the loss would depend on the "
                f"layout. Leave {option} out, or use one data rank and cp: 1"
            )


def _has_batch_statistics(module: nn.Module) -> bool:
    """An instance norm has statistics of each sample, but for those that it tracks."""
    if not module.training or not isinstance(module, AnyNormWithStatistics):
        return False
    return isinstance(module, AnyBatchNorm) or module.track_running_stats


def refuse_accumulation_hooks(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if has_accumulation_hooks(parameter):
            raise AgreedError(
                f"the parameter {name} has a hook behind the accumulation of its gradient, which "
                "with several data ranks would act on a part of the sum: use "
                "optimizer.clip_norm, an autograd function in the forward, a hook by "
                "register_hook that is linear, or one data rank"
            )


def refuse_parameters(model: nn.Module, *, fsdp: bool) -> None:
    """Rejects parameters that cannot be replaced by a part on each rank."""
    whole_on_each_rank = state_parameters(model)
    for name, parameter in model.named_parameters():
        if has_gradient_hooks(parameter):
            raise AgreedError(
                f"the parameter {name} has a hook on its gradient, which its parts on several "
                "ranks would not have: change the gradient by an autograd function in the "
                "forward, or use dp_replicate or pp"
            )
        if fsdp and parameter.dim() == 0 and parameter not in whole_on_each_rank:
            raise AgreedError(
                f"the parameter {name} has no dim that dp_shard or cp could cut: give it one, "
                "torch.zeros(1), or use dp_replicate"
            )
        if fsdp and parameter.numel() == 0:
            raise AgreedError(
                f"the parameter {name} of shape {tuple(parameter.shape)} has no elements that "
                "dp_shard or cp could cut: leave it out, or use dp_replicate"
            )


def refuse_float8(
    model: nn.Module, precision: str, splits: Sequence[Split] = (), tp: int = 1
) -> None:
    """Rejects a model that cannot multiply in float8, split like this over `tp`. `precision`: that
    of all else."""
    problems = float8_problems(model, splits, tp)
    if precision == "float16":
        problems.append(
            "float16 has no room for values rounded to 8 bits: use the precision bfloat16"
        )
    if problems:
        raise InputError(f"linear_precision float8: {'; '.join(problems)}")


def refuse_undecided(
    model: nn.Module, tp: TensorParallel, sample: Sequence[Tensor | None], unverified: str
) -> None:
    """Rejects a plan that leaves out a parameter between a column-wise and a row-wise layer, or
    that leaves it open for a model that does not run without values. `unverified`: why no
    comparison has shown it."""
    names = undecided(model, tp.plan, tp.splits)
    if not names:
        return
    where = (
        "between a colwise and a rowwise layer, where each rank of tp has a part of the features"
    )
    try:
        between = parameters_between(model, tp.splits, names, sample)
    except PlainError as error:
        raise AgreedError(
            f"{', '.join(names)}: whether they lie {where}, the tp_plan does not say, the model "
            f"was not compared with the plain one ({unverified}), and its forward does not run "
            f"without values ({error}): give them the style {REPLICATED} if they do, or replicate "
            "if not"
        ) from error
    if between:
        raise AgreedError(
            f"{', '.join(between)}: they lie {where}, so that their gradients have to be summed: "
            f"give them the style {REPLICATED} in the tp_plan"
        )


def refuse_plain_dropout(model: nn.Module) -> None:
    """Without sequence parallelism each rank of `tp` would draw its own mask for the same
    activations."""
    for name, module in model.named_modules():
        if isinstance(module, AnyDropout) and module.p > 0:
            raise InputError(
                f"{name} is a {type(module).__name__}, whose mask each rank of tp would draw for "
                "itself, and without sequence_parallel all of them have the same activations: use "
                "meshtrain.dropout.Dropout, a probability of 0, or, if the model computes the "
                "same with it, sequence_parallel true"
            )
