"""Reading ahead: the microbatches of one rank, through torch's DataLoader.

Which samples a microbatch has is decided here, in the main process, by `order.py`; worker processes only read them.
So the number of workers changes nothing but the time.
"""

import os
import signal
import threading
import traceback
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch.utils.data import DataLoader, Sampler

from meshtrain.data import order, order_numpy
from meshtrain.data.batch import Batch, Packed, Samples
from meshtrain.errors import InputError
from meshtrain.orphans import end_with_parent


class Slots(NamedTuple):
    """The samples of one microbatch."""

    items: list[tuple[int, int]]  # (epoch, sample); those from `valid` on are copies that fill it up
    valid: int


def train_batches(
    dataset: Samples,
    *,
    seed: int,
    first_step: int,
    steps: int,
    global_size: int,
    micro_size: int,
    rank: int,
    ranks: int,
    workers: int = 0,
    prefetch: int = 2,
    pin_memory: bool = False,
) -> Iterator[list[Batch]]:
    """The microbatches of one data rank, a list for each step of range(first_step, steps).

    Every rank gets lists of the same length, and every microbatch has `micro_size` rows; where a rank's share of the
    global batch ends before that, the rows are copies of some sample with all targets IGNORE.

    Args:
        seed, first_step, steps: the run's seed, the step to begin with (from 0) and the step to end before.
        rank, ranks: the position among the data ranks, and their number.
        workers: processes that read ahead; 0 reads in this one.
        prefetch: microbatches that each worker reads ahead; more where all of them together have less than a step.
        pin_memory: give tensors in pinned memory, where there is a GPU.

    Raises:
        InputError: what the data holds cannot be trained on, wherever it was read.
        RuntimeError: a sample could not be read; names it, with the traceback of the process that read it.
    """
    slots = _TrainSlots(len(dataset), seed, range(first_step, steps), global_size, micro_size, rank, ranks)
    count = order.microbatches(global_size, micro_size, ranks)
    ahead = max(prefetch, -(-count // max(workers, 1)))  # a step takes all of its microbatches before it begins
    batches = iter(_Loader(dataset, slots, workers, ahead, pin_memory, persistent=False))
    for _ in range(first_step, steps):
        yield [next(batches) for _ in range(count)]


def eval_batches(
    dataset: Samples,
    *,
    micro_size: int,
    rank: int,
    ranks: int,
    workers: int = 0,
    prefetch: int = 2,
    pin_memory: bool = False,
) -> "EvalBatches":
    """One data rank's share of a data set, each sample once over the ranks, in the data set's order.

    The result can be gone through again and again, and keeps its worker processes in between. The number of batches,
    its `len`, is the same on every rank; rows that fill up the last ones have all targets IGNORE.
    """
    return EvalBatches(dataset, micro_size, rank, ranks, workers, prefetch, pin_memory)


class EvalBatches:
    """What `eval_batches` gives; `samples`: how many there are, over all ranks."""

    def __init__(
        self, dataset: Samples, micro_size: int, rank: int, ranks: int, workers: int, prefetch: int, pin_memory: bool
    ) -> None:
        self.samples = len(dataset)
        slots = _EvalSlots(self.samples, micro_size, rank, ranks)
        self._count = len(slots)
        self._loader = _Loader(dataset, slots, workers, prefetch, pin_memory, persistent=True)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._loader)


class _TrainSlots(Sampler[Slots]):
    def __init__(
        self, n_samples: int, seed: int, steps: range, global_size: int, micro_size: int, rank: int, ranks: int
    ) -> None:
        self.n_samples, self.seed, self.steps = n_samples, seed, steps
        self.global_size, self.micro_size = global_size, micro_size
        self.share = order.share(global_size, ranks, rank)
        self.count = order.microbatches(global_size, micro_size, ranks)

    def __iter__(self) -> Iterator[Slots]:
        for step in self.steps:
            first = step * self.global_size
            positions = range(first + self.share.start, first + self.share.stop)
            own = order_numpy.items(self.seed, positions, self.n_samples)
            filler = own[0] if own else order.items(self.seed, range(first, first + 1), self.n_samples)[0]
            yield from _filled(own, filler, self.count, self.micro_size)


class _EvalSlots(Sampler[Slots]):
    def __init__(self, n_samples: int, micro_size: int, rank: int, ranks: int) -> None:
        self.share, self.micro_size = order.share(n_samples, ranks, rank), micro_size
        self.count = order.microbatches(n_samples, micro_size, ranks)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Slots]:
        return _filled([(0, sample) for sample in self.share], (0, 0), self.count, self.micro_size)


def _filled(own: Sequence[tuple[int, int]], filler: tuple[int, int], count: int, micro_size: int) -> Iterator[Slots]:
    for start in range(0, count * micro_size, micro_size):
        taken = list(own[start : start + micro_size])
        yield Slots(taken + [filler] * (micro_size - len(taken)), len(taken))


class _Failure(NamedTuple):
    """An error on its way out of a worker.

    It travels as a value: torch would wrap an InputError into a page of traceback, and an error that is raised out of
    its iterator keeps the iterator alive, whose workers then take 5 s to end (the garbage collector closes the queue
    that would tell them).
    """

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
            return self.samples.read(slots.items, slots.valid)
        except InputError as error:
            return _Failure(str(error), None)
        except Exception as error:
            return _Failure(str(error), traceback.format_exc())


class _Loader:
    def __init__(
        self, dataset: Samples, slots: Sampler[Slots], workers: int, prefetch: int, pin_memory: bool, persistent: bool
    ) -> None:
        # fork: a user's own data set comes from a file loaded by path, which no other start method can send; and a
        # worker is there at once, where a fresh Python would first import torch for seconds.
        ahead = {"prefetch_factor": prefetch, "multiprocessing_context": "fork", "worker_init_fn": _quiet_worker}
        self._loader: DataLoader = DataLoader(
            _Reader(dataset),
            batch_sampler=slots,  # type: ignore[arg-type]  # torch hands what it yields to __getitems__ as it is
            collate_fn=_as_it_is,
            num_workers=workers,
            persistent_workers=persistent and workers > 0,
            pin_memory=pin_memory and torch.cuda.is_available(),
            # torch draws a seed for its workers; the run's own random numbers must not depend on how it reads.
            generator=torch.Generator().manual_seed(0),
            **(ahead if workers else {}),  # type: ignore[arg-type]
        )

    def __iter__(self) -> Iterator[Batch]:
        batches = iter(self._loader)
        try:
            for found in batches:
                if isinstance(found, _Failure):
                    raise found.error()
                yield found if isinstance(found, Batch) else found.batch()
        finally:
            del batches  # ends the workers now, and not when the traceback goes


def _as_it_is(found: object) -> object:
    return found


def _quiet_worker(_: int) -> None:
    """A worker leaves signals to the process it works for, and ends with it.

    Ctrl-C, torchrun and SLURM signal whole process groups. A run that is asked to stop finishes its step, and needs
    its workers for that; so they heed SIGTERM only from their own parent, as torch's DataLoader sends it.
    """
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    end_with_parent()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
