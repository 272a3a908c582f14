"""The check before the first step: whether a model that is split over `tp`, or takes parts of
sequences over `cp`, computes the same as the plain model, and over data ranks, whether a sample's
result depends on those beside it or on forwards before.

Two copies, one of them split, run a forward and a backward of a short sample. Values are compared
at the inputs and outputs of blocks; each block, and the code between blocks, has its own backward.
Weights are random, because a norm of ones or a layer of zeros would hide an error. They exist for
one block at a time; identical blocks are computed once. Neither the model nor the state of a random
generator changes.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshtrain.data.batch import Batch
from meshtrain.errors import AgreedError
from meshtrain.layout import DATA_AXES
from meshtrain.mesh import Mesh
from meshtrain.parallel.context import ContextParallel, misplaced_calls
from meshtrain.parallel.mixed_precision import master_dtype, random_state
from meshtrain.parallel.sharding import chunk_range, local_part
from meshtrain.parallel.tensor_parallel import (
    AXIS,
    TensorParallel,
    partial_parameters,
    replace_layers,
)
from meshtrain.parallel.tp_plan import cut_through_heads
from meshtrain.parallel.verify.comparison import (
    SAME_CODE,
    PlainError,
    Run,
    Sample,
    Terms,
    no_terms,
    signature,
    skeleton,
)

# tokens of a made-up sample, and of one for a model that does not take so many
MADE_UP, SHORT = (
    64,
    8,
)


class Verdict(NamedTuple):
    """What `verify` found of a model that it accepts."""

    # why the plain model fails on a made-up sample, so that nothing was compared
    unverified: str | None
    # why it is accepted only without sequence parallelism; None: as it is
    without_parts: str | None


def verify(
    model: nn.Module,
    blocks: Sequence[str],
    tp: TensorParallel,
    sample: Sample | None,
    precision: str,
    may_fall_back: bool = False,
    least: int = MADE_UP,
) -> Verdict:
    """Compares a plain model with the same model split over `tp`. All ranks call it together and
    reach one verdict.

    Args:
        model: plain, on any device, meta included. blocks: unique names of its blocks.
        sample: the arguments of `model(*sample)`, two short samples are enough; None: made up, of
            `least` tokens.
        may_fall_back: a model that computes the same only without sequence parallelism is accepted.

    Raises AgreedError: they differ, or the plain model fails on `sample`.
    """
    without_parts: str | None = None
    mesh, dtype, size = tp.mesh, master_dtype(precision), tp.mesh.size(AXIS)
    inputs = made_up_sample(model, size, least) if sample is None else sample
    inputs = [
        x if x is None else x.to(mesh.device_type, dtype if x.is_floating_point() else None)
        for x in inputs
    ]

    def rows(n: int) -> list[int]:
        return list(range(n))[chunk_range(n, size, mesh.index(AXIS))]

    def compare(sequence: bool, training: bool, seed: int) -> tuple[str | None, bool]:
        plain, split = skeleton(model, dtype, training), skeleton(model, dtype, training)
        replace_layers(split, replace(tp, sequence_parallel=sequence))
        kinds = {
            name: signature(plain.get_submodule(name)) + signature(split.get_submodule(name))
            for name in blocks
        }
        places = {
            name: local_part(p)[1] for name, p in split.named_parameters() if isinstance(p, DTensor)
        }
        summed = {module._parameters[name] for module, name in partial_parameters(split, sequence)}
        reference = Run(plain, mesh, kinds, places=places, seed=seed)
        compared = Run(split, mesh, kinds, reference, AXIS, rows, sequence, summed, seed=seed)
        return compared.compare(inputs, inputs), reference.draws

    def difference() -> str | None:
        if (problem := _in_training(partial(compare, tp.sequence_parallel))) is None:
            return None
        without = tp.sequence_parallel and _in_training(partial(compare, False)) is None
        if without and may_fall_back:
            nonlocal without_parts
            without_parts = problem
            return None
        remedy = (
            "parallel.sequence_parallel: false, which passes this check" if without else "tp: 1"
        )
        cut = cut_through_heads(tp.splits, dict(model.named_modules()))
        hint = (
            ""
            if cut is None
            else f". If {cut} is attention, set its attribute head_dim, by which heads stay whole"
        )
        return (
            f"{problem}{hint}. Use {remedy}, or mend the model or its tp_plan "
            "(docs/tensor-parallel.md says how)"
        )

    failure = _verdict(mesh, AXIS, sample, difference)
    if failure is None or least == SHORT:
        return Verdict(failure, without_parts)
    return verify(model, blocks, tp, sample, precision, may_fall_back, SHORT)


def verify_context(
    model: nn.Module,
    blocks: Sequence[str],
    modules: Sequence[str],
    context: ContextParallel,
    mesh: Mesh,
    sample: Sample | None,
    precision: str,
    least: int = MADE_UP,
) -> str | None:
    """Compares a plain model on whole sequences with the same model on parts of them over `cp`; see
    `verify`. `modules`: those that call attention, once per forward. `sample`: tokens, positions,
    documents, (b, s) or None."""
    device, dtype = torch.device(mesh.device_type), master_dtype(precision)
    if sample is not None and (sample[0] is None or sample[0].shape[1] % (2 * context.size)):
        sample = None
    inputs = made_up_sample(model, 2 * context.size, least) if sample is None else sample
    tokens, positions, *others = (*inputs, None, None)[: max(3, len(inputs))]
    assert tokens is not None
    length = tokens.shape[1]
    targets = tokens.new_zeros(tokens.shape[:2], dtype=torch.int64)
    positions = torch.arange(length).expand(targets.shape) if positions is None else positions
    whole = Batch.of((tokens, positions, *others), targets).apply(lambda x: x.cpu()).with_context()
    part = context.shard(whole).to(device, dtype)

    def rows(n: int) -> list[int]:
        return context.positions(n).tolist() if n == length else []

    def compare(training: bool, seed: int) -> tuple[str | None, bool]:
        plain, other = skeleton(model, dtype, training), skeleton(model, dtype, training)
        inside = {
            name: [m.removeprefix(name) for m in modules if f"{m}.".startswith(f"{name}.")]
            for name in blocks
        }
        kinds = {name: f"{signature(plain.get_submodule(name))} {inside[name]}" for name in blocks}
        summed, reference = set(other.parameters()), Run(plain, mesh, kinds, seed=seed)
        compared = Run(
            other, mesh, kinds, reference, "cp", rows, sums_shared=True, partial=summed, seed=seed
        )
        with misplaced_calls(other, modules, part.inputs[2]) as misplaced:
            problem = compared.compare(whole.to(device, dtype).inputs, part.inputs, misplaced)
        return problem, reference.draws

    def difference() -> str | None:
        problem = _in_training(compare)
        return problem and (
            f"{problem}. Tokens may see each other in the modules that the cp_plan names alone, "
            "there through "
            "meshtrain.attention.attention, which gets the model's third input: use cp: 1, or mend "
            "the model or its "
            "cp_plan"
        )

    if (failure := _verdict(mesh, "cp", sample, difference)) is None or least == SHORT:
        return failure
    return verify_context(model, blocks, modules, context, mesh, sample, precision, SHORT)


def verify_samples(
    model: nn.Module,
    blocks: Sequence[str],
    mesh: Mesh,
    sample: Sample,
    precision: str,
    terms: Terms = no_terms,
) -> None:
    """Compares a plain model's results for two samples with those of its second forward of them,
    and on several data ranks with those for the same samples in another batch. All ranks call it
    together. A model that cannot be compared is left alone.

    Args:
        sample: its arguments, with the samples along the first dim. terms:
            `meshtrain.loss.seen_terms`.

    Raises AgreedError: they differ, so that the layout would change the loss.
    """
    device, dtype, size = mesh.device_type, master_dtype(precision), 2
    sizes = {len(x) for x in sample if x is not None and x.dim() > 0}
    if len(sizes) != 1 or sizes.pop() < size or any(buffer.is_meta for buffer in model.buffers()):
        return
    whole = [
        x if x is None else x[:size].to(device, dtype if x.is_floating_point() else None)
        for x in sample
    ]
    # another size and another order; no batch of one sample, which a model may not take
    order = [
        1,
        0,
        0,
    ]
    other = [x if x is None else x[order] for x in whole]

    def rows(n: int) -> list[int]:
        return order if n == size else []

    def compare(beside: bool, training: bool, seed: int) -> tuple[str | None, bool]:
        plain = skeleton(model, dtype, training)
        kinds = {name: signature(plain.get_submodule(name)) for name in blocks}
        options: dict[str, Any] = {"terms": terms, "tolerance": SAME_CODE, "seed": seed}
        reference = Run(plain, mesh, kinds, **options)
        if beside:
            again = Run(
                skeleton(model, dtype, training), mesh, kinds, reference, rows=rows, **options
            )
        else:
            again = Run(plain, mesh, kinds, reference, **options)
        problem = again.compare(whole, other if beside else whole)
        return None if reference.draws and not training else problem, reference.draws

    with suppress(PlainError), _generators_kept():
        if (
            mesh.size(*DATA_AXES) > 1
            and (problem := _in_training(partial(compare, True))) is not None
        ):
            raise AgreedError(
                "with several data ranks the loss would depend on the layout, because the model "
                "computes something "
                f"else for a sample if others are beside it: {problem}. Compute each sample from "
                "itself, use one data "
                "rank, or leave this check out by parallel.verify: false"
            )
        if (problem := _in_training(partial(compare, False))) is not None:
            raise AgreedError(
                "the model computes something else in a second forward of the same samples: "
                f"{problem}. Each rank has "
                "its own of what it keeps between forwards, and a block that is recomputed changes "
                "it twice: keep "
                "nothing, sum it over the global batch (meshtrain.loss.tally), use one data rank, "
                "cp: 1 and recompute: "
                "none, or leave this check out by parallel.verify: false"
            )


def _in_training(compare: Callable[[bool, int], tuple[str | None, bool]]) -> str | None:
    """The problem found in training mode, or in evaluation mode if the plain model draws random
    numbers in training; None if other weights do not have it: then rounding has changed a choice,
    such as that of a router.

    Args:
        compare: of (training, seed of the weights) -> the problem, and whether random numbers were
            drawn.
    """
    problem, draws = compare(True, 0)
    if draws:
        problem, _ = compare(False, 0)
    return problem if problem is not None and compare(not draws, 1)[0] is not None else None


def _verdict(
    mesh: Mesh, axis: str, sample: Sample | None, difference: Callable[[], str | None]
) -> str | None:
    """Raises AgreedError for a difference; otherwise returns the result of `verify`."""
    try:
        with _generators_kept():
            problem = difference()
    except PlainError as error:  # on all ranks, which compute the same
        if sample is None:
            return str(error)
        raise AgreedError(
            f"the plain model does not take the first samples ({error}): mend it, or leave its "
            "check out by "
            "parallel.verify: false"
        ) from error
    if problem is not None:
        raise AgreedError(
            f"with {axis} {mesh.size(axis)} the model does not compute what it does on one device: "
            f"{problem}. "
            "parallel.verify: false leaves this check out"
        )
    return None


@contextmanager
def _generators_kept() -> Iterator[None]:
    restore = random_state()
    try:
        with torch.enable_grad():
            yield
    finally:
        restore()


def made_up_sample(model: nn.Module, parts: int, least: int = MADE_UP) -> list[Tensor]:
    """Two short samples of token ids or features, as the model's first embedding or linear layer
    takes them."""
    draw, length = torch.Generator().manual_seed(0), parts * max(2, math.ceil(least / parts))
    tables = [
        module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)
    ]
    if tables:
        return [torch.randint(min(tables), (2, length), generator=draw)]
    widths = [module.in_features for module in model.modules() if isinstance(module, nn.Linear)]
    return [torch.randn(2, length, *widths[:1], generator=draw)]
