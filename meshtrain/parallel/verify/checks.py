"""The table of checks of a model: for each moment their names, when they apply, and what judges.

A check refuses by raising InputError, or AgreedError where all ranks find the same. Some find out
how the model has to be parallelized, and return options.
"""

import inspect
import warnings
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn

from meshtrain.dropout import Dropout
from meshtrain.errors import AgreedError, InputError, join_some
from meshtrain.mesh import Mesh
from meshtrain.parallel.linear.lora import has_adapter
from meshtrain.parallel.linear_cross_entropy import can_fuse
from meshtrain.parallel.mixed_precision import (
    cast,
    compute_dtype,
    is_mixed,
    state_parameters,
)
from meshtrain.parallel.options import (
    ParallelOptions,
    block_names,
    context_parallel_of,
)
from meshtrain.parallel.torch_private import writes_to_parameter
from meshtrain.parallel.tp_plan import context_modules, no_context_plan, plan_of
from meshtrain.parallel.verify.attention import watch_attention
from meshtrain.parallel.verify.comparison import (
    Plain,
    compare_context,
    compare_documents,
    compare_samples,
    compare_split,
    made_up_sample,
)
from meshtrain.parallel.verify.forward import gives_logits, idle_adapters
from meshtrain.parallel.verify.inputs import refuse_single_tokens, take_only_parts
from meshtrain.parallel.verify.refusals import (
    refuse_accumulation_hooks,
    refuse_batch_statistics,
    refuse_float8,
    refuse_parameters,
    refuse_plain_dropout,
    refuse_statistics_of_parts,
    refuse_undecided,
    refuse_uneven_microbatches,
)
from meshtrain.parallel.verify.side_effects import refuse_side_effects
from meshtrain.parallel.verify.subject import Moment, Subject, is_ours
from meshtrain.pipeline.probe import blocks_used_outside, check_forward
from meshtrain.pipeline.stage import Skipped, blocks_of


def check_model(moment: Moment, subject: Subject) -> ParallelOptions:
    """Makes the checks of a moment. Returns the options, with what they have found out.

    At `Moment.PLAIN` all ranks call it together.

    Raises:
        InputError: the layout would change what the model computes.
    """
    for check in CHECKS[moment]:
        if check.applies(subject):
            found = check.judge(subject)
            if found is not None:
                subject = replace(subject, options=found)
    return subject.options


def needs_sample(subject: Subject) -> bool:
    """Whether the checks of a run look at a sample of its data (`ParallelOptions.sample`)."""
    over_tp = _over_tp(subject)
    if subject.compares:
        compares_samples = subject.shares_samples_out or subject.runs_again
        return over_tp or compares_samples or subject.packs_documents
    # One question about the plan is asked in any case: `refuse_undecided`.
    return over_tp and not is_ours(subject.model)


# When checks apply ------------------------------------------------------------------------------


def _over_tp(subject: Subject) -> bool:
    return subject.layout.size("tp") > 1


def _over_cp(subject: Subject) -> bool:
    return subject.layout.size("cp") > 1


def _in_stages(subject: Subject) -> bool:
    return bool(subject.bounds) and subject.copy is not None and subject.inputs is not None


def _inputs_known(subject: Subject) -> bool:
    return (subject.options.sample or subject.inputs) is not None


def _replicated(subject: Subject) -> bool:
    # Other axes cut parameters, and refuse every hook.
    return subject.layout.size("dp_replicate") > 1


def _adapted(subject: Subject) -> bool:
    return subject.inputs is not None and any(map(has_adapter, subject.model.modules()))


def _shares_samples_out(subject: Subject) -> bool:
    return subject.shares_samples_out


def _cuts_parameters(subject: Subject) -> bool:
    assert subject.mesh is not None
    return subject.mesh.uses_fsdp or subject.layout.size("tp") > 1 or subject.layout.size("ep") > 1


def _compares_samples(subject: Subject) -> bool:
    several = subject.shares_samples_out or subject.runs_again
    return several and subject.compares and subject.options.sample is not None


def _compares_documents(subject: Subject) -> bool:
    if not subject.packs_documents or not subject.compares:
        return False
    # Not images, nor a data set of one's own that has no documents.
    _, _, documents, *_ = [*(subject.options.sample or ()), None, None, None]
    return documents is not None


def _compares_context(subject: Subject) -> bool:
    return _over_cp(subject) and subject.compares


def _multiplies_in_float8(subject: Subject) -> bool:
    return subject.options.linear_precision is not None


def _has_parts_over_tp(subject: Subject) -> bool:
    return subject.tp is not None and subject.tp.sequence_parallel


def _is_whole_over_tp(subject: Subject) -> bool:
    return subject.tp is not None and not subject.tp.sequence_parallel


def _compares_split(subject: Subject) -> bool:
    return _over_tp(subject) and not subject.options.trace


def _gathers_or_casts_blocks(subject: Subject) -> bool:
    """A pipeline's stage gathers and casts all its parameters by blocks."""
    assert subject.mesh is not None
    if subject.copy is None or (subject.options.sample is None and subject.inputs is None):
        return False  # nothing to look at
    by_blocks = subject.mesh.uses_fsdp or is_mixed(subject.options.precision)
    return by_blocks and subject.layout.size("pp") == 1


def _may_fuse_loss(subject: Subject) -> bool:
    return subject.is_language_model and subject.copy is not None and subject.inputs is not None


def _drops_parts_over_tp(subject: Subject) -> bool:
    drops = any(isinstance(m, Dropout) and m.p > 0 for m in subject.model.modules())
    return _over_tp(subject) and bool(subject.options.sequence_parallel) and drops


def _knows_parts_over_cp(subject: Subject) -> bool:
    return _over_cp(subject) and subject.context is not None


def _first_forward_shows_attention(subject: Subject) -> bool:
    # What was not compared. Calls in a compiled block cannot be seen.
    options = subject.options
    is_unverified = options.verify is False and not options.trace
    return _over_cp(subject) and is_unverified and not options.compile


def _first_forward_shows_state(subject: Subject) -> bool:
    return subject.compares and (subject.shares_samples_out or subject.runs_again)


# What judges ------------------------------------------------------------------------------------


def _of_model(refuse: Callable[[nn.Module], None]) -> Callable[[Subject], None]:
    """A judge that looks at the model alone."""
    return lambda subject: refuse(subject.model)


def _uneven_microbatches(subject: Subject) -> None:
    replicas = subject.layout.size("dp_replicate")
    refuse_uneven_microbatches(subject.model, replicas, subject.micro_size, subject.global_sizes)


def _arguments(subject: Subject) -> None:
    inputs = subject.options.sample or subject.inputs
    assert inputs is not None
    # A wrapper that hands its arguments on says nothing of them.
    signature = inspect.signature(subject.model.forward, follow_wrapped=False)
    try:
        signature.bind(*inputs)
    except TypeError as error:
        given = "tokens, positions and documents" if len(inputs) == 3 else f"{len(inputs)} inputs"
        raise AgreedError(
            f"the forward of {type(subject.model).__name__} takes {signature}, and is called with "
            f"{given}: {error}. Write a forward that takes them and returns logits "
            "(docs/foreign-models.md)"
        ) from error


def _stages(subject: Subject) -> None:
    assert subject.copy is not None
    assert subject.inputs is not None
    dtype = compute_dtype(subject.options.precision)
    assert subject.whole is not None
    whole = subject.whole(subject.inputs)
    check_forward(subject.copy(), subject.bounds, subject.inputs, dtype, whole)


def _idle_adapters(subject: Subject) -> None:
    assert subject.inputs is not None
    idle = idle_adapters(subject.model, subject.inputs)
    if idle:
        raise InputError(
            f"train.lora: the model's forward does not call {join_some(idle)}, so adapters there "
            "would do nothing: call the layer in the place of using its weight, or give "
            "train.lora.match patterns of the others"
        )


def _used_outside(subject: Subject) -> ParallelOptions:
    assert subject.copy is not None
    assert subject.mesh is not None
    inputs = subject.options.sample or subject.inputs
    assert inputs is not None
    model = subject.copy()
    found = blocks_used_outside(model, inputs)
    kept_whole = state_parameters(model)
    written = [name for name in found.written if model.get_parameter(name) not in kept_whole]
    if subject.mesh.uses_fsdp and written:
        # FSDP gathers only a copy.
        raise AgreedError(writes_to_parameter(written[0]))
    precision = subject.options.precision
    if is_mixed(precision) and found.in_backward and not subject.mesh.uses_fsdp:
        raise AgreedError(
            f"block {found.in_backward[0]} has a backward of the model's own (a "
            f"torch.autograd.Function), which computes with float32 weights, and with {precision} "
            "its forward with others: use float32, or dp_shard, which keeps the weights of the "
            "forward"
        )
    return replace(subject.options, used_outside=found.blocks)


def _samples(subject: Subject) -> None:
    plain = _plain(subject)
    blocks = {name: subject.model.get_submodule(name) for name in plain.blocks}
    recomputed = [name for name, block in blocks.items() if _is_recomputed(subject, block)]
    compare_samples(plain, subject.terms, recomputed)


def _documents(subject: Subject) -> None:
    as_context = plan_of(subject.model, "cp_plan", subject.options.cp_plan) is not None
    compare_documents(_plain(subject), as_context=as_context)


def _context_plan(subject: Subject) -> None:
    plan = plan_of(subject.model, "cp_plan", subject.options.cp_plan)
    if not plan:
        raise InputError(no_context_plan(type(subject.model).__name__))
    context_modules(subject.model, plan)  # raises for what the plan has wrong


def _context(subject: Subject) -> None:
    assert subject.mesh is not None
    plan = plan_of(subject.model, "cp_plan", subject.options.cp_plan)
    modules = context_modules(subject.model, plan)
    context = context_parallel_of(subject.mesh, subject.options)
    unverified = compare_context(_plain(subject), modules, context)
    _warn_unverified(subject.mesh, unverified)


def _parameters(subject: Subject) -> None:
    assert subject.mesh is not None
    refuse_parameters(subject.model, fsdp=subject.mesh.uses_fsdp)


def _float8(subject: Subject) -> None:
    splits = () if subject.tp is None else subject.tp.splits
    refuse_float8(subject.model, subject.options.precision, splits, subject.layout.size("tp"))


def _split(subject: Subject) -> ParallelOptions:
    """Where each rank has a part of the sequence by default, and only without that the model
    computes the same, it is turned off."""
    assert subject.mesh is not None
    assert subject.tp is not None
    tp, options = subject.tp, subject.options
    unverified: str | None = "verify is off"
    if subject.compares:
        may_fall_back = options.sequence_parallel is None
        verdict = compare_split(_plain(subject), tp, may_fall_back=may_fall_back)
        unverified = verdict.unverified
        if verdict.without_parts is not None:
            tp = replace(tp, sequence_parallel=False)
            _warn(
                subject.mesh,
                "parallel.sequence_parallel is off: with it the model does not compute what it "
                f"does on one device: {verdict.without_parts}",
            )
    if unverified is not None and not tp.sequence_parallel:
        sample = options.sample
        if sample is None:
            sample = made_up_sample(subject.model, subject.layout.size("tp"))
        refuse_undecided(subject.model, tp, sample, unverified)
    if subject.compares:
        _warn_unverified(subject.mesh, unverified)
    return replace(options, sequence_parallel=tp.sequence_parallel)


def _loss_head(subject: Subject) -> ParallelOptions:
    """The last layer returns the loss if its output is the logits, unchanged; not for a model that
    does not run on the meta device."""
    assert subject.copy is not None
    assert subject.inputs is not None
    plain = cast(subject.copy(), compute_dtype(subject.options.precision))
    *others, layer = blocks_of(plain)
    # What blocks between the first and the last return does not matter, and computing it takes
    # seconds.
    for block in others[1:]:
        block.forward = Skipped(block)
    inputs = [None if x is None else x.to("meta") for x in subject.inputs]
    returns_logits = can_fuse(layer) and gives_logits(plain, layer, inputs)
    return replace(subject.options, fuse_loss=returns_logits)


def _only_parts(subject: Subject) -> None:
    assert subject.context is not None
    take_only_parts(subject.model, subject.context)


def _attention_calls(subject: Subject) -> None:
    plan = plan_of(subject.model, "cp_plan", subject.options.cp_plan) or {}
    # In a stage, some patterns match only blocks of other stages.
    attention = [
        name
        for name, _ in subject.model.named_modules()
        if any(fnmatchcase(name, pattern) for pattern in plan)
    ]
    watch_attention(subject.model, attention)


def _is_recomputed(subject: Subject, block: nn.Module) -> bool:
    is_single_layer = next(block.children(), None) is None
    return subject.runs_again and not is_single_layer


def _side_effects(subject: Subject) -> None:
    assert subject.mesh is not None
    again: set[nn.Module] = set()
    for block in subject.units:
        if _is_recomputed(subject, block):
            again |= set(block.modules())
    refuse_side_effects(subject.model, subject.mesh, again)


def _plain(subject: Subject) -> Plain:
    assert subject.mesh is not None
    options = subject.options
    blocks = block_names(subject.model)
    return Plain(subject.model, blocks, subject.mesh, options.sample, options.precision)


def _warn_unverified(mesh: Mesh, reason: str | None) -> None:
    if reason is not None:
        _warn(
            mesh,
            f"the model was not compared with the plain one: {reason}: give a sample=(...)",
        )


def _warn(mesh: Mesh, text: str) -> None:
    if mesh.rank == 0:
        warnings.warn(text, stacklevel=5)


# The table --------------------------------------------------------------------------------------


class Check(NamedTuple):
    name: str
    applies: Callable[[Subject], bool]
    judge: Callable[[Subject], ParallelOptions | None]


# In the order in which they are made: what a module or a plan has wrong by itself comes before the
# comparisons, which can only say where values differ.
CHECKS: dict[Moment, list[Check]] = {
    Moment.START: [
        Check("hooks that see uneven microbatches", _replicated, _uneven_microbatches),
        Check("arguments of the forward", _inputs_known, _arguments),
        Check("work between blocks of stages", _in_stages, _stages),
        Check("adapters that are not called", _adapted, _idle_adapters),
    ],
    Moment.PLAIN: [
        Check("arguments of the forward", _inputs_known, _arguments),
        Check("parameters used outside", _gathers_or_casts_blocks, _used_outside),
        Check("statistics of a batch", _shares_samples_out, _of_model(refuse_batch_statistics)),
        Check("accumulation hooks", _shares_samples_out, _of_model(refuse_accumulation_hooks)),
        Check("parameters that no rank can cut", _cuts_parameters, _parameters),
        Check("plan of attention", _over_cp, _context_plan),
        Check("layers in float8", _multiplies_in_float8, _float8),
        Check("statistics of parts", _has_parts_over_tp, _of_model(refuse_statistics_of_parts)),
        Check("other samples, forwards before", _compares_samples, _samples),
        Check("documents that share a row", _compares_documents, _documents),
        Check("parts of sequences over cp", _compares_context, _context),
        Check("layers split over tp", _compares_split, _split),
        Check("masks of each rank", _is_whole_over_tp, _of_model(refuse_plain_dropout)),
        Check("logits that nothing changes", _may_fuse_loss, _loss_head),
    ],
    Moment.PARALLEL: [
        Check("single tokens", _drops_parts_over_tp, _of_model(refuse_single_tokens)),
        Check("whole sequences", _knows_parts_over_cp, _only_parts),
        Check("attention elsewhere", _first_forward_shows_attention, _attention_calls),
        Check("state that a forward changes", _first_forward_shows_state, _side_effects),
    ],
}
