"""Prefetching: the microbatches of one rank, through torch's DataLoader.

The main process decides with `order.py` which samples a microbatch has; worker processes only read
them.
"""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, Self, TypedDict, Unpack

import torch
from torch.utils.data import DataLoader

from meshtrain import observer
from meshtrain.data.batch import Batch, Samples
from meshtrain.data.order import BatchSizes, Mixture, microbatches, share
from meshtrain.data.order_numpy import run_order
from meshtrain.errors import InputError
from meshtrain.job.pending import Resource, waiting
from meshtrain.job.signals import end_with_parent


class Reading(TypedDict, total=False):
    """How batches are read; no option but `prepare` changes their contents."""

    workers: int  # worker processes that read ahead; 0, the default, reads in this process
    # Turns a batch into the model's input: `Batch.with_context`, or the rank's part by
    # `ContextParallel.shard`.
    prepare: Callable[[Batch], Batch]


# Microbatches that each worker reads ahead; more where all workers together do not hold a step.
PREFETCH = 2

# The samples of one microbatch, each (epoch, sample), and how many of them are real: the rest are
# copies as padding.
Slots = tuple[list[tuple[int, int]], int]


def train_batches(
    dataset: Samples,
    *,
    seed: int,
    first_step: int,
    steps: int,
    global_size: int | Sequence[Sequence[int]],
    micro_size: int,
    rank: int,
    ranks: int,
    mixture: Mixture | None = None,
    lengths: Sequence[Sequence[int]] = (),
    **reading: Unpack[Reading],
) -> Iterator[list[Batch]]:
    """The microbatches of one data rank, a list for each step of range(first_step, steps).

    Every rank gets lists of the same length, and every microbatch has `micro_size` rows; rows
    beyond a rank's share of the global batch are copies of some sample with all targets IGNORE.

    Args:
        first_step, steps: the first step (counted from 0) and the step to end before.
        global_size: samples per step, or how they change (see `BatchSizes`).
        rank, ranks: this rank's index among the data ranks, and their number.
        mixture: decides which source each sample comes from, for a data set of several sources.
        lengths: token counts to which samples are cut, [first step, tokens] each; empty: they are
            not cut.

    Raises:
        InputError: the data cannot be trained on, whichever process read it.
        RuntimeError: a sample could not be read; names the sample, with the traceback of the
            process that read it.
    """
    sizes = BatchSizes.of(global_size)
    order = run_order(seed, sizes, len(dataset), mixture)

    def slots() -> Iterator[Slots]:
        for step in range(first_step, steps):
            positions = sizes.positions(step)
            own_share = share(len(positions), ranks, rank)
            own = order.items(positions[own_share.start : own_share.stop])
            # A rank may have no sample of a small batch; it computes a copy of another's.
            filler = own[0] if own else order.items(positions[:1])[0]
            count = microbatches(len(positions), micro_size, ranks)
            yield from _fill(own, filler, count, micro_size)

    together = microbatches(sizes.largest, micro_size, ranks)
    prepare = reading.pop("prepare", Batch.batch)
    length = 0  # of the step's samples; the workers read whole ones, which may be of a later step

    def prepare_step(batch: Batch) -> Batch:
        return prepare(batch.shortened(length) if lengths else batch)

    reading["prepare"] = prepare_step
    batches = iter(_Loader(dataset, slots(), persistent=False, together=together, **reading))
    for step in range(first_step, steps):
        if lengths:
            length = BatchSizes.of(lengths).size(step)
        count = microbatches(sizes.size(step), micro_size, ranks)
        all_of_step = sizes.size(step) if count == 1 else None
        yield [replace(next(batches), together=all_of_step) for _ in range(count)]


class Indexable(Protocol):
    """A data set of a script of one's own: a torch `Dataset`, a tensor, a list."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def collated_batches(
    dataset: Indexable,
    collate: Callable[[list[Any]], Any],
    *,
    seed: int,
    first_step: int,
    steps: int,
    global_size: int,
    rank: int,
    ranks: int,
    workers: int = 0,
) -> Iterator[Any]:
    """Of each step of range(first_step, steps), the samples of one data rank as `collate` stacks
    them: its share of the global batch, or a copy of the batch's first sample if it has none.

    Arguments and errors are those of `train_batches`, whose samples these are.
    """
    order = run_order(seed, BatchSizes.of(global_size), len(dataset))
    own_share = share(global_size, ranks, rank)

    def slots() -> Iterator[Slots]:
        for step in range(first_step, steps):
            positions = range(step * global_size, (step + 1) * global_size)
            own = order.items(positions[own_share.start : own_share.stop])
            yield own or order.items(positions[:1]), len(own)

    batches = _Loader(
        _CollatedSamples(dataset, collate), slots(), persistent=False, workers=workers
    )
    for batch in batches:
        yield batch.value


@dataclass(frozen=True)
class _Collated:
    """What a user's `collate` has returned."""

    value: Any

    def batch(self) -> Self:
        return self

    def pin_memory(self) -> Self:
        return self  # what it consists of is the user's


@dataclass(frozen=True)
class _CollatedSamples:
    dataset: Indexable
    collate: Callable[[list[Any]], Any]

    def read(self, items: Sequence[tuple[int, int]], valid: int) -> _Collated:
        samples = [self._sample(index) for _, index in items]
        return _Collated(self.collate(samples))

    def _sample(self, index: int) -> Any:
        try:
            return self.dataset[index]
        except InputError:
            raise
        except Exception as error:
            raise RuntimeError(
                f"sample {index} of the data set could not be read: {type(error).__name__}: {error}"
            ) from error


class EvalBatches:
    """One data rank's share of a data set, in the data set's order; over all ranks, each sample
    comes once. The whole set is dealt out at once, or `together` samples at a time, as in steps.

    Can be iterated repeatedly, and keeps its worker processes in between. The number of batches,
    its `len`, is the same on every rank; all targets of the padding rows of the last batches are
    IGNORE.
    """

    def __init__(
        self,
        dataset: Samples,
        *,
        micro_size: int,
        rank: int,
        ranks: int,
        together: int | None = None,
        **reading: Unpack[Reading],
    ) -> None:
        self.samples = len(dataset)  # over all ranks
        self._slots: list[Slots] = []
        self._together: list[int | None] = []  # of each batch: see `Batch`
        every = range(self.samples)
        for start in range(0, self.samples, together or self.samples):
            dealt = every[start : start + together] if together else every
            own = [(0, dealt[i]) for i in share(len(dealt), ranks, rank)]
            count = microbatches(len(dealt), micro_size, ranks)
            self._slots += _fill(own, (0, 0), count, micro_size)
            self._together += [len(dealt) if count == 1 else None] * count
        self._loader = _Loader(dataset, self._slots, persistent=True, **reading)

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Batch]:
        for batch, together in zip(self._loader, self._together, strict=True):
            yield replace(batch, together=together)


def _fill(
    own: Sequence[tuple[int, int]], filler: tuple[int, int], count: int, micro_size: int
) -> Iterator[Slots]:
    for start in range(0, count * micro_size, micro_size):
        items = list(own[start : start + micro_size])
        padding = [filler] * (micro_size - len(items))
        yield items + padding, len(items)


class _Failure(NamedTuple):
    """An error returned by a worker as a value: torch would wrap an InputError in a page of
    traceback, and an error raised out of the DataLoader's iterator keeps the iterator alive, whose
    workers then take 5 s to end."""

    message: str
    traceback: str | None  # None: an InputError, which needs no traceback

    def error(self) -> Exception:
        if self.traceback is None:
            return InputError(self.message)
        return RuntimeError(f"{self.message}\n\nWhere it was read:\n{self.traceback}")


class _Reader(torch.utils.data.Dataset):
    """Adapts a data set to torch's DataLoader, which passes the indices of a whole microbatch at
    once."""

    def __init__(self, samples: Any) -> None:
        """`samples`: `Samples`, or what reads microbatches as they do."""
        self.samples = samples

    def __getitems__(self, slots: Slots) -> Any:
        try:
            read = self.samples.read(*slots)
            if observer.current is not None:
                items, real = slots
                observer.current.samples(items[:real], list(_tensors_in(read.batch())))
            return read
        except InputError as error:
            return _Failure(str(error), None)
        except Exception as error:
            return _Failure(str(error), traceback.format_exc())


def _tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """The tensors of a batch, or of what a user's `collate` has put into tuples, lists and dicts:
    each has a row for every sample."""
    match values:
        case torch.Tensor():
            yield values
        case _Collated():
            yield from _tensors_in(values.value)
        case Batch():
            yield from _tensors_in([values.inputs, values.targets])
        case Mapping():
            yield from _tensors_in(list(values.values()))
        case tuple() | list():
            for value in values:
                yield from _tensors_in(value)


class _Loader:
    def __init__(
        self,
        dataset: "Samples | _CollatedSamples",
        slots: Iterable[Slots],
        *,
        persistent: bool,
        together: int = 1,
        workers: int = 0,
        prepare: Callable[[Any], Any] = lambda batch: batch,
    ) -> None:
        """`together`: microbatches per step; a step takes all of them before it begins."""
        self._prepare = prepare
        # GPUs copy faster from pinned memory, and while they compute.
        self._pins = torch.cuda.is_available()

        if sys.platform != "linux":
            # The system's own libraries may not survive a fork (macOS), and what is read does not
            # depend on who reads it.
            workers = 0
        reading_ahead: dict[str, Any] = {}
        if workers:
            reading_ahead = {
                "prefetch_factor": max(PREFETCH, -(-together // workers)),
                # fork: a user's data set comes from a module loaded by path, which cannot be
                # pickled for other start methods; and a forked worker starts at once, while a fresh
                # Python would first import torch for seconds.
                "multiprocessing_context": "fork",
                "worker_init_fn": _start_worker,
                "persistent_workers": persistent,
            }
        self._loader: DataLoader = DataLoader(
            _Reader(dataset),
            batch_sampler=slots,  # type: ignore[arg-type]  # torch passes its items to __getitems__ unchanged
            collate_fn=lambda batch: batch,
            num_workers=workers,
            pin_memory=self._pins,
            # torch draws a seed for its workers; the run's own random numbers must not depend on
            # how data is read.
            generator=torch.Generator().manual_seed(0),
            **reading_ahead,
        )

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        try:
            while True:
                with waiting("the next batch", resource=Resource.DATA):
                    read = next(batches, None)
                if read is None:
                    return
                if isinstance(read, _Failure):
                    raise read.error()
                batch = self._prepare(read.batch())
                if self._pins:
                    batch = batch.pin_memory()  # `prepare` may have made new tensors
                yield batch
        finally:
            del batches  # ends the workers now, not when the traceback is freed


def _start_worker(_: int) -> None:
    """Ctrl-C, torchrun and SLURM signal whole process groups. A run that is asked to stop still
    needs its workers to finish the step, so they obey SIGTERM only from their own parent, as
    torch's DataLoader sends it."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    end_with_parent()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
