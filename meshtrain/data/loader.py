"""Reading ahead: the microbatches of one rank, through torch's DataLoader.

The main process decides by `order.py` which samples a microbatch has; worker processes only read them.
"""

import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypedDict, Unpack

import torch
from torch.utils.data import DataLoader

from meshtrain.data.batch import Batch, Packed, Samples
from meshtrain.data.order import BatchSizes, Mixture, microbatches, share
from meshtrain.data.order_numpy import SampleOrder
from meshtrain.errors import InputError
from meshtrain.job.pending import Resource, waiting
from meshtrain.job.signals import end_with_parent


class Reading(TypedDict, total=False):
    """How batches are read; nothing of it but `prepare` changes what they are."""

    workers: int  # processes that read ahead; 0, the default, reads in this one
    prefetch: int  # microbatches that each worker reads ahead (2); more where all together have less than a step
    pin_memory: bool  # give tensors in pinned memory, where there is a GPU
    # What a model with a `cp_plan` gets of a batch: `Batch.with_context`, or its part by `ContextParallel.shard`.
    prepare: Callable[[Batch], Batch]


# The samples of one microbatch, each (epoch, sample); those from the number on are copies that fill it up.
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

    Every rank gets lists of the same length, and every microbatch has `micro_size` rows; where a rank's share of the
    global batch ends before that, the rows are copies of some sample with all targets IGNORE.

    Args:
        first_step, steps: the step to begin with (from 0) and the step to end before.
        global_size: the samples of a step, or how they change (see `BatchSizes`).
        rank, ranks: the position among the data ranks, and their number.
        mixture: of a data set of several sources, which a step takes samples from.
        lengths: the tokens to which samples are cut, [first step, tokens] each; none: they are not.

    Raises:
        InputError: what the data holds cannot be trained on, wherever it was read.
        RuntimeError: a sample could not be read; names it, with the traceback of the process that read it.
    """
    sizes = BatchSizes.of(global_size)
    order = SampleOrder(seed, sizes, len(dataset), mixture)

    def slots() -> Iterator[Slots]:
        for step in range(first_step, steps):
            positions = sizes.positions(step)
            own_share = share(len(positions), ranks, rank)
            own = order.items(positions[own_share.start : own_share.stop])
            filler = own[0] if own else order.items(positions[:1])[0]
            yield from _fill(own, filler, microbatches(len(positions), micro_size, ranks), micro_size)

    prepare = reading.pop("prepare", Batch.batch)
    reading["prepare"] = lambda batch: prepare(batch.shortened(length) if lengths else batch)  # of the step below
    together = microbatches(sizes.largest, micro_size, ranks)
    batches = iter(_Loader(dataset, slots(), persistent=False, together=together, **reading))
    for step in range(first_step, steps):
        length = BatchSizes.of(lengths or 1).size(step)
        yield [next(batches) for _ in range(microbatches(sizes.size(step), micro_size, ranks))]


class EvalBatches:
    """One data rank's share of a data set, each sample once over the ranks, in the data set's order.

    It can be gone through again and again, and keeps its worker processes in between. The number of batches, its `len`,
    is the same on every rank; rows that fill up the last ones have all targets IGNORE.
    """

    def __init__(self, dataset: Samples, *, micro_size: int, rank: int, ranks: int, **reading: Unpack[Reading]) -> None:
        self.samples = len(dataset)  # over all ranks
        own, count = share(self.samples, ranks, rank), microbatches(self.samples, micro_size, ranks)
        self._slots = list(_fill([(0, sample) for sample in own], (0, 0), count, micro_size))
        self._loader = _Loader(dataset, self._slots, persistent=True, **reading)

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._loader)


def _fill(own: Sequence[tuple[int, int]], filler: tuple[int, int], count: int, micro_size: int) -> Iterator[Slots]:
    for start in range(0, count * micro_size, micro_size):
        items = list(own[start : start + micro_size])
        yield items + [filler] * (micro_size - len(items)), len(items)


class _Failure(NamedTuple):
    """An error on its way out of a worker, as a value: torch would wrap an InputError into a page of traceback, and an
    error that is raised out of its iterator keeps that alive, whose workers then take 5 s to end."""

    message: str
    traceback: str | None  # None: an InputError, which needs none

    def error(self) -> Exception:
        if self.traceback is None:
            return InputError(self.message)
        return RuntimeError(f"{self.message}\n\nWhere it was read:\n{self.traceback}")


class _Reader(torch.utils.data.Dataset):
    """The data set as torch's DataLoader wants it: it hands over a whole microbatch at once."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __getitems__(self, slots: Slots) -> Batch | Packed | _Failure:
        try:
            return self.samples.read(*slots)
        except InputError as error:
            return _Failure(str(error), None)
        except Exception as error:
            return _Failure(str(error), traceback.format_exc())


class _Loader:
    def __init__(
        self, dataset: Samples, slots: Iterable[Slots], *, persistent: bool, together: int = 1, workers: int = 0,
        prefetch: int = 2, pin_memory: bool = False, prepare: Callable[[Batch], Batch] = Batch.batch,
    ) -> None:  # fmt: skip
        """`together`: the microbatches of a step, which takes all of them before it begins."""
        self._prepare, self._pins = prepare, pin_memory and torch.cuda.is_available()
        prefetch = max(prefetch, -(-together // max(workers, 1)))
        # fork: a user's own data set comes from a file loaded by path, which no other start method can send; and a
        # worker is there at once, where a fresh Python would first import torch for seconds.
        ahead = {"prefetch_factor": prefetch, "multiprocessing_context": "fork", "worker_init_fn": _start_worker}
        self._loader: DataLoader = DataLoader(
            _Reader(dataset),
            batch_sampler=slots,  # type: ignore[arg-type]  # torch hands what it yields to __getitems__ as it is
            collate_fn=lambda batch: batch,
            num_workers=workers,
            persistent_workers=persistent and workers > 0,
            pin_memory=self._pins,
            # torch draws a seed for its workers; the run's own random numbers must not depend on how it reads.
            generator=torch.Generator().manual_seed(0),
            **(ahead if workers else {}),  # type: ignore[arg-type]
        )

    def __iter__(self) -> Iterator[Batch]:
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
                yield batch.pin_memory() if self._pins else batch  # a part is a new tensor
        finally:
            del batches  # ends the workers now, and not when the traceback goes


def _start_worker(_: int) -> None:
    """Ctrl-C, torchrun and SLURM signal whole process groups. A run that is asked to stop needs its workers to finish
    its step, so they heed SIGTERM only from their own parent, as torch's DataLoader sends it."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    end_with_parent()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
