"""Compares a plain model with itself in other ways: split over `tp`, on parts of sequences over
`cp`, with other samples beside, in a second forward, and on a document without the one before it.

Two copies run a forward and a backward of a short sample (`recording.py`). Neither the model nor
the state of a random generator changes. A difference counts if two draws of weights have it: with
one of them, rounding may have changed a choice, such as that of a router.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshtrain.data.batch import Batch
from meshtrain.errors import AgreedError
from meshtrain.layout import DATA_AXES
from meshtrain.mesh import Mesh
from meshtrain.parallel.context import ContextParallel
from meshtrain.parallel.mixed_precision import master_dtype, random_state
from meshtrain.parallel.predictions import depths_of
from meshtrain.parallel.sharding import chunk_range, local_part
from meshtrain.parallel.tensor_parallel import (
    AXIS,
    TensorParallel,
    partial_parameters,
    replace_layers,
)
from meshtrain.parallel.torch_private import own_parameters
from meshtrain.parallel.tp_plan import cut_through_heads
from meshtrain.parallel.verify.attention import misplaced_calls
from meshtrain.parallel.verify.recording import (
    PlainError,
    Recording,
    Sample,
    Terms,
    no_terms,
    signature,
    skeleton,
)

MADE_UP = 64  # tokens of a made-up sample
SHORT = 8  # of one for a model that does not take so many


@dataclass(frozen=True)
class Plain:
    """The model that is compared.

    Attributes:
        model: plain, on any device, meta included.
        blocks: unique names of its blocks.
        sample: the arguments of `model(*sample)`, two short samples are enough; None: made up.
        precision: the run's.
    """

    model: nn.Module
    blocks: Sequence[str]
    mesh: Mesh
    sample: Sample | None
    precision: str

    @property
    def has_values(self) -> bool:
        """Whether it has all values that `skeleton` does not make up."""
        return not any(buffer.is_meta for buffer in self.model.buffers())

    def skeleton(self, training: bool) -> nn.Module:
        """A copy to run, without memory for weights."""
        return skeleton(self.model, master_dtype(self.precision), training)

    def on_device(self, inputs: Sample) -> list[Tensor | None]:
        dtype = master_dtype(self.precision)
        moved: list[Tensor | None] = []
        for x in inputs:
            if x is None:
                moved.append(None)
            else:
                moved.append(x.to(self.mesh.device_type, dtype if x.is_floating_point() else None))
        return moved


# What torch says of a view, a reshape or an unflatten of another size.
WRONG_SHAPE = ("is invalid for input of size", "don't multiply up to the size")


class Result(NamedTuple):
    """What one comparison says."""

    problem: str | None
    # Whether the plain model has drawn random numbers.
    draws: bool


Comparison = Callable[[bool, int], Result]  # of (training, seed of the weights)


class Verdict(NamedTuple):
    """What `compare_split` says of a model that it accepts."""

    # Why the plain model fails on a made-up sample, so that nothing was compared.
    unverified: str | None
    # Why it is accepted only without sequence parallelism; None: as it is.
    without_parts: str | None


def compare_split(plain: Plain, tp: TensorParallel, *, may_fall_back: bool) -> Verdict:
    """Compares a plain model with the same model split over `tp`. All ranks call it together and
    reach one verdict.

    Args:
        may_fall_back: a model that computes the same only without sequence parallelism is accepted.

    Raises AgreedError: they differ, or the plain model fails on the sample.
    """
    without_parts: str | None = None

    def difference(least: int) -> str | None:
        nonlocal without_parts
        inputs = plain.sample
        if inputs is None:
            inputs = made_up_sample(plain.model, tp.mesh.size(AXIS), least)
        inputs = plain.on_device(inputs)
        problem = _in_training(_split_comparison(plain, tp, inputs))
        if problem is None:
            return None
        remedy = "tp: 1"
        if tp.sequence_parallel:
            whole = replace(tp, sequence_parallel=False)
            if _in_training(_split_comparison(plain, whole, inputs)) is None:
                if may_fall_back:
                    without_parts = problem
                    return None
                remedy = "parallel.sequence_parallel: false, which passes this check"
        if any(told in problem for told in WRONG_SHAPE):
            problem += (
                ". A module that counts heads by itself has to take their number from its tensors, "
                "view(..., -1, head_dim), because a rank has some of them"
            )
        cut = cut_through_heads(tp.splits, dict(plain.model.named_modules()))
        if cut is not None:
            problem += (
                f". If {cut} is attention, set its attribute head_dim, by which heads stay whole"
            )
        return (
            f"{problem}. Use {remedy}, or mend the model or its tp_plan (docs/tensor-parallel.md "
            "says how)"
        )

    return Verdict(_refuse_difference(plain, AXIS, difference), without_parts)


def _split_comparison(plain: Plain, tp: TensorParallel, inputs: Sample) -> Comparison:
    """Of the plain model with the one whose layers are split like this."""
    mesh = tp.mesh
    size = mesh.size(AXIS)
    index = mesh.index(AXIS)

    def rows(n: int) -> list[int]:
        """Those of n that this rank has."""
        return list(range(n))[chunk_range(n, size, index)]

    def compare(training: bool, seed: int) -> Result:
        whole = plain.skeleton(training)
        split = plain.skeleton(training)
        replace_layers(split, tp)
        kinds = {}
        for name in plain.blocks:
            # Blocks are of one kind if they are alike before and after the split.
            before = signature(whole.get_submodule(name))
            after = signature(split.get_submodule(name))
            kinds[name] = before + after
        places = {}
        for name, p in split.named_parameters():
            if isinstance(p, DTensor):
                _, places[name] = local_part(p)
        summed = set()
        for module, name in partial_parameters(split, tp.sequence_parallel):
            summed.add(own_parameters(module)[name])
        reference = Recording(whole, mesh, kinds, places=places, seed=seed)
        compared = Recording(
            split,
            mesh,
            kinds,
            reference,
            axis=AXIS,
            rows=rows,
            sums_shared=tp.sequence_parallel,
            partial=summed,
            seed=seed,
        )
        return Result(compared.compare(inputs, inputs), reference.draws)

    return compare


def compare_context(plain: Plain, modules: Sequence[str], context: ContextParallel) -> str | None:
    """Compares a plain model on whole sequences with the same model on parts of them over `cp`.

    Args:
        plain: its sample is tokens, positions and documents, (b, s) or None.
        modules: those that call attention, once per forward.

    Returns why the plain model fails on a made-up sample, so that nothing was compared. Raises
    AgreedError as `compare_split`.
    """
    parts = 2 * context.size
    sample = plain.sample
    if sample is not None and (sample[0] is None or sample[0].shape[1] % parts):
        sample = None
    plain = replace(plain, sample=sample)

    def difference(least: int) -> str | None:
        inputs = plain.sample
        if inputs is None:
            inputs = made_up_sample(plain.model, parts, least)
        problem = _in_training(_context_comparison(plain, modules, context, inputs))
        if problem is None:
            return None
        return (
            f"{problem}. Tokens may see each other in the modules that the cp_plan names alone, "
            "there through meshtrain.attention.attention, which gets the model's third input: use "
            "cp: 1, or mend the model or its cp_plan"
        )

    return _refuse_difference(plain, "cp", difference)


def _context_comparison(
    plain: Plain, modules: Sequence[str], context: ContextParallel, inputs: Sample
) -> Comparison:
    """Of the model on whole sequences with itself on this rank's parts of them."""
    mesh = plain.mesh
    device, dtype = torch.device(mesh.device_type), master_dtype(plain.precision)
    whole = _batch_of(inputs).looking_ahead(depths_of(plain.model)).with_context()
    part = context.shard(whole).to(device, dtype)
    whole = whole.to(device, dtype)
    length = whole.targets.shape[1]

    def rows(n: int) -> list[int]:
        return context.positions(n).tolist() if n == length else []

    def compare(training: bool, seed: int) -> Result:
        model, other = plain.skeleton(training), plain.skeleton(training)
        kinds = {}
        for name in plain.blocks:
            # Blocks of one kind call attention in the same places.
            inside = [m.removeprefix(name) for m in modules if f"{m}.".startswith(f"{name}.")]
            kinds[name] = f"{signature(model.get_submodule(name))} {inside}"
        reference = Recording(model, mesh, kinds, seed=seed, ahead=whole.ahead)
        compared = Recording(
            other,
            mesh,
            kinds,
            reference,
            axis="cp",
            rows=rows,
            sums_shared=True,
            partial=set(other.parameters()),
            seed=seed,
            ahead=part.ahead,
        )
        with misplaced_calls(other, modules, part.inputs[2]) as misplaced:
            problem = compared.compare(whole.inputs, part.inputs, misplaced)
        return Result(problem, reference.draws)

    return compare


def _batch_of(inputs: Sample) -> Batch:
    """A batch of whole sequences on the CPU, with positions."""
    # A model may take fewer inputs than tokens, positions and documents, or more.
    padded = [*inputs, *[None] * (3 - len(inputs))]
    tokens, positions, *others = padded
    assert tokens is not None
    targets = tokens.new_zeros(tokens.shape[:2], dtype=torch.int64)
    if positions is None:
        positions = torch.arange(tokens.shape[1]).expand(targets.shape)
    batch = Batch.of((tokens, positions, *others), targets)
    return batch.apply(lambda x: x.cpu())


def compare_samples(
    plain: Plain, terms: Terms = no_terms, recomputed: Collection[str] = ()
) -> None:
    """Compares a plain model's results for two samples with those of its second forward of them,
    and on several data ranks with those for the same samples in another batch. All ranks call it
    together. A model that cannot be compared is left alone.

    Args:
        plain: its sample has the samples along the first dim.
        terms: `meshtrain.loss.seen_terms`.
        recomputed: the blocks whose forward runs again for their backward.

    Raises AgreedError: they differ, so that the layout would change the loss.
    """
    two = _two_samples(plain)
    if two is None:
        return
    with suppress(PlainError), _generators_kept():
        if plain.mesh.size(*DATA_AXES) > 1:
            problem = _in_training(_beside_comparison(plain, two, terms))
            if problem is not None:
                raise AgreedError(
                    "with several data ranks the loss would depend on the layout, because the "
                    "model computes something else for a sample if others are beside it: "
                    f"{problem}. Compute each sample from itself, use one data rank, or leave this "
                    "check out by parallel.verify: false"
                )
        problem = _in_training(_again_comparison(plain, two, terms, recomputed))
        if problem is not None:
            if recomputed and _in_training(_again_comparison(plain, two, terms)) is None:
                raise AgreedError(
                    "a block that is recomputed would compute something else than before: "
                    f"{problem}. It changes what it is given, such as a cache of keys and values: "
                    "use recompute: none, or leave this check out by parallel.verify: false"
                )
            raise AgreedError(
                "the model computes something else in a second forward of the same samples: "
                f"{problem}. Each rank has its own of what it keeps between forwards, and a block "
                "that is recomputed changes it twice: keep nothing, sum it over the global batch "
                "(meshtrain.loss.tally), use one data rank, cp: 1 and recompute: none, or leave "
                "this check out by parallel.verify: false"
            )


def _two_samples(plain: Plain) -> list[Tensor | None] | None:
    """The first two samples; None: there are not as many, or the model has no values."""
    assert plain.sample is not None
    lengths = {len(x) for x in plain.sample if x is not None and x.dim() > 0}
    if len(lengths) != 1 or lengths.pop() < 2 or not plain.has_values:
        return None
    two = [None if x is None else x[:2] for x in plain.sample]
    return plain.on_device(two)


def _beside_comparison(plain: Plain, two: Sample, terms: Terms) -> Comparison:
    """Of two samples with the same ones in another batch."""
    # Of another size and in another order. Not of one sample, which a model may not take.
    order = [1, 0, 0]
    other = [None if x is None else x[order] for x in two]

    def rows(n: int) -> list[int]:
        return order if n == 2 else []

    def compare(training: bool, seed: int) -> Result:
        model = plain.skeleton(training)
        kinds = _kinds(plain, model)
        reference = Recording(model, plain.mesh, kinds, terms=terms, seed=seed)
        again = Recording(
            plain.skeleton(training),
            plain.mesh,
            kinds,
            reference,
            rows=rows,
            terms=terms,
            seed=seed,
        )
        return _without_draws(again.compare(two, other), reference, training)

    return compare


def _again_comparison(
    plain: Plain, two: Sample, terms: Terms, recomputed: Collection[str] = ()
) -> Comparison:
    """Of two forwards of the same samples."""

    def compare(training: bool, seed: int) -> Result:
        model = plain.skeleton(training)
        kinds = _kinds(plain, model)
        reference = Recording(model, plain.mesh, kinds, terms=terms, seed=seed)
        # The same copy, with all that the first forward has kept.
        again = Recording(
            model,
            plain.mesh,
            kinds,
            reference,
            terms=terms,
            seed=seed,
            recomputed=recomputed,
        )
        return _without_draws(again.compare(two, two), reference, training)

    return compare


def compare_documents(plain: Plain, *, as_context: bool) -> None:
    """Compares a plain model's results for the second of two documents in one row with those for
    this document alone. All ranks call it together. A model that cannot be compared is left alone,
    and so are terms of the loss, which may be statistics of a row.

    Args:
        plain: its sample begins with tokens, positions and documents, (b, s).
        as_context: the model takes the documents as an `AttentionContext`.

    Raises AgreedError: they differ.
    """
    packed = _two_documents(plain)
    if packed is None:
        return
    with suppress(PlainError), _generators_kept():
        problem = _in_training(_document_comparison(plain, packed, as_context))
        if problem is not None:
            raise AgreedError(
                "data.mask_documents: the model computes something else for a document if another "
                f"is before it in its row: {problem}. Let no token see another document (the "
                "forward gets positions, which begin at 0 in each, and documents), use "
                "data.mask_documents: false, or leave this check out by parallel.verify: false"
            )


def _two_documents(plain: Plain) -> Batch | None:
    """The first sample as one row of two documents; None: it is too short, or the model has no
    values."""
    assert plain.sample is not None
    row = _batch_of([None if x is None else x[:1] for x in plain.sample])
    length = row.targets.shape[1]
    if length < 2 or not plain.has_values:
        return None
    places = torch.arange(length)[None]
    documents = (places >= length // 2).long()
    positions = places - documents * (length // 2)
    tensors = {**row.tensors, "positions": positions, "documents": documents}
    return replace(row, tensors=tensors)


def _document_comparison(plain: Plain, packed: Batch, as_context: bool) -> Comparison:
    """Of a row of two documents with the second one alone."""
    length = packed.targets.shape[1]
    second = list(range(length))[length // 2 :]
    alone = packed.along_sequence(lambda x, dim: x.narrow(dim, second[0], len(second)))

    def rows(n: int) -> list[int]:
        return second if n == length else []

    def inputs_of(batch: Batch) -> Sample:
        batch = batch.with_context() if as_context else batch
        device = torch.device(plain.mesh.device_type)
        return batch.to(device, master_dtype(plain.precision)).inputs

    def compare(training: bool, seed: int) -> Result:
        model = plain.skeleton(training)
        # Tables of rotary embeddings may begin at the row's first token: they are relative.
        settings: Any = {"terms": no_terms, "seed": seed, "constants_differ": True}
        reference = Recording(model, plain.mesh, _kinds(plain, model), **settings)
        other = plain.skeleton(training)
        compared = Recording(other, plain.mesh, reference.kinds, reference, rows=rows, **settings)
        problem = compared.compare(inputs_of(packed), inputs_of(alone))
        return _without_draws(problem, reference, training)

    return compare


def _kinds(plain: Plain, model: nn.Module) -> dict[str, str]:
    return {name: signature(model.get_submodule(name)) for name in plain.blocks}


def _without_draws(problem: str | None, reference: Recording, training: bool) -> Result:
    """A model that draws random numbers in evaluation too cannot be compared with itself."""
    if reference.draws and not training:
        problem = None
    return Result(problem, reference.draws)


def _in_training(compare: Comparison) -> str | None:
    """The problem found in training mode, or in evaluation mode if the plain model draws random
    numbers in training; None if other weights do not have it: then rounding has changed a choice,
    such as that of a router."""
    training = True
    problem, draws = compare(training, 0)
    if draws:
        training = False
        problem, _ = compare(training, 0)
    if problem is None:
        return None
    with_other_weights, _ = compare(training, 1)
    return None if with_other_weights is None else problem


def _refuse_difference(
    plain: Plain, axis: str, difference: Callable[[int], str | None]
) -> str | None:
    """Raises AgreedError for a difference. Otherwise returns why nothing was compared: the plain
    model fails on made-up samples; None: it was.

    Args:
        difference: the problem, with a made-up sample of at least so many tokens.
    """
    try:
        with _generators_kept():
            problem = difference(MADE_UP)
    except PlainError as error:  # on all ranks, which compute the same
        if plain.sample is not None:
            raise AgreedError(
                f"the plain model does not take the first samples ({error}): mend it, or leave its "
                "check out by parallel.verify: false"
            ) from error
        try:
            with _generators_kept():
                problem = difference(SHORT)
        except PlainError as short_error:
            return str(short_error)
    if problem is not None:
        raise AgreedError(
            f"with {axis} {plain.mesh.size(axis)} the model does not compute what it does on one "
            f"device: {problem}. parallel.verify: false leaves this check out"
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
    takes them. They have at least so many tokens, divisible into `parts` of two or more."""
    draw = torch.Generator().manual_seed(0)
    length = parts * max(2, math.ceil(least / parts))
    vocabularies = [
        module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)
    ]
    if vocabularies:
        return [torch.randint(min(vocabularies), (2, length), generator=draw)]
    widths = [module.in_features for module in model.modules() if isinstance(module, nn.Linear)]
    return [torch.randn(2, length, *widths[:1], generator=draw)]
