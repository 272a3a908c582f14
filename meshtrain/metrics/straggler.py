"""Stragglers: which ranks keep the others waiting, found from each rank's measurements of its own
time.

Every so many steps each rank puts a report into the job's store, and rank 0 reads them all a step
later, when nobody waits for that. `pace.py` judges them.
"""

import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from meshtrain.errors import group_values
from meshtrain.job.process import Job
from meshtrain.job.storage import optional, write_whole
from meshtrain.layout import DATA_AXES, Layout
from meshtrain.metrics.gpu_probe import GpuProbe
from meshtrain.metrics.nvml import UNKNOWN, gpu_condition
from meshtrain.metrics.pace import LOOKS, RankPace, Straggler, StragglerTest
from meshtrain.metrics.step_timer import memory_gib

THROTTLED = (
    "see to the cooling and the power of that host (nvidia-smi -q -d PERFORMANCE), or leave it out"
)
NODE_CHECK = (
    "run `meshtrain doctor --local` on that host when the job is over; leave the host out if it "
    "stays slow"
)

# steps per look: their quartiles are steady, and a straggler is named within three looks
EVERY = 20
# rank 0 reads a report of every rank in a look, so looks are rarer in a large world
RANKS_PER_STEP = 32
FEWEST = 8  # measured steps that a look needs
WARM_UP = 3  # first steps of a job, excluded from looks: caches fill, kernels are chosen

# Keys of the store: the report of a rank, and the ranks whose GPUs are to be looked at.
REPORT = "pace/{}"
SUSPECTS = "pace/suspects"


@dataclass(frozen=True)
class Report:
    """What a rank tells rank 0 in a look."""

    who: str
    step: int
    pace: RankPace
    memory_gib: float
    gpu_model: str
    probe: Sequence[float]  # seconds of the GPU's probes since the last look

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes) -> "Report":
        values = json.loads(text)
        return cls(**{**values, "pace": RankPace.from_json(values["pace"])})


class StragglerDetector:
    """One rank's part in the comparison; all ranks call `finish_step` after the same steps."""

    def __init__(
        self, job: Job, first: int, say: Callable[[str], None], folder: Path | None = None
    ) -> None:
        """`folder`: where rank 0 writes `ranks.json`, with each rank's time and memory at the last
        look."""
        assert job.layout is not None  # it was placed
        self._job = job
        self._store: Any = job.store
        self._every = max(EVERY, job.world_size // RANKS_PER_STEP)
        self._begins = first + WARM_UP
        self._steps: list[Mapping[str, float]] = []  # since the last look
        self.probe = GpuProbe(job.device, active=job.world_size > 1)
        self._probes: list[float] = []  # seconds since the last look
        self._gpu = UNKNOWN
        self._gpu_thread = threading.Thread()
        self._uuid = ""
        if job.device.type == "cuda":
            self._uuid = f"GPU-{torch.cuda.get_device_properties(job.device).uuid}"
        self.comparison: Comparison | None = None
        if job.rank == 0:
            self.comparison = Comparison(self._store, job.layout, self._every, say, folder)

    def finish_step(self, step: int, times: Mapping[str, float]) -> dict[str, float]:
        """Takes a step's times (StepTimer.pop) before the next update; on rank 0 sometimes returns
        fields for a row."""
        if self._store is None:
            return {}
        self._probes += self.probe.pop()
        fields = {}
        if self.comparison is not None:
            fields = self.comparison.read_if_posted()
        if step >= self._begins:
            self._steps.append(times)
        if step % self._every == 0:
            self._look(step)
        return fields

    def _look(self, step: int) -> None:
        steps, self._steps = self._steps, []
        if len(steps) < FEWEST:  # the same on all ranks
            return
        probe, self._probes = self._probes, []
        cores = os.cpu_count() or 1
        report = Report(
            who=str(self._job),
            step=step,
            pace=RankPace.of(steps, self._job.host, os.getloadavg()[0], cores, self._gpu),
            memory_gib=memory_gib(self._job.device),
            gpu_model=self.probe.model,
            probe=probe,
        )
        self._store.set(REPORT.format(self._job.rank), report.to_json())
        if self.comparison is not None:
            self.comparison.posted = step
        if self._uuid and self._is_suspect() and not self._gpu_thread.is_alive():
            # In a thread: a driver in trouble may take seconds.
            self._gpu_thread = threading.Thread(target=self._ask_gpu, name="nvml", daemon=True)
            self._gpu_thread.start()

    def _is_suspect(self) -> bool:
        if not self._store.check([SUSPECTS]):  # nobody has been slow so far
            return False
        return self._job.rank in json.loads(self._store.get(SUSPECTS))

    def _ask_gpu(self) -> None:
        self._gpu = gpu_condition(self._uuid)


class Comparison:
    """Rank 0's part: reads the reports of all ranks, and says which of them are slow."""

    def __init__(
        self,
        store: Any,
        layout: Layout,
        every: int,
        say: Callable[[str], None],
        folder: Path | None,
    ) -> None:
        self._store = store
        self._layout = layout
        self._every = every  # steps from look to look
        self._say = say
        self._folder = folder
        self._test = StragglerTest(layout.groups(*DATA_AXES))
        self._probe_test: StragglerTest | None = None  # once it is known who has the same GPU model
        self._suspects: set[int] = set()  # as posted to the ranks
        self.posted: int | None = None  # the step of the look that has not been read yet
        self.writer = threading.Thread()

    def read_if_posted(self) -> dict[str, float]:
        """Called one step after rank 0's own post: that step ended with a sum over all ranks, so
        all have posted, and nobody waits. Returns fields for a row."""
        if self.posted is None:
            return {}
        keys = [REPORT.format(rank) for rank in range(self._layout.world_size)]
        reports = list(map(Report.from_json, self._store.multi_get(keys)))
        assert {report.step for report in reports} == {self.posted}, "all look after the same steps"
        self.posted = None

        fields = self._compare_times(reports)
        fields |= self._compare_probes(reports)
        self._post_suspects()
        # In a thread: a slow disk must not delay the step.
        if self._folder is not None and not self.writer.is_alive():
            file = self._folder / "ranks.json"
            self.writer = threading.Thread(target=self._write, args=(file, reports), daemon=True)
            self.writer.start()
        return fields

    def _compare_times(self, reports: Sequence[Report]) -> dict[str, float]:
        new, recovered = self._test.update([report.pace for report in reports])
        for straggler in new:
            self._say(describe(straggler, reports[straggler.rank].who, LOOKS * self._every))
        for rank in recovered:
            self._say(f"{reports[rank].who} is as fast as its peers again")

        times = [report.pace.own.middle for report in reports]
        memory = [report.memory_gib for report in reports]
        return {
            "own_time_median_s": median(times),
            "own_time_max_s": max(times),
            "own_time_max_rank": times.index(max(times)),
            "memory_max_gib": max(memory),
            "memory_max_rank": memory.index(max(memory)),
        }

    def _compare_probes(self, reports: Sequence[Report]) -> dict[str, float]:
        """The same test for the GPUs alone, if each was probed since the last look."""
        if not all(report.probe for report in reports):
            return {}
        if self._probe_test is None:
            by_model = group_values((report.gpu_model, i) for i, report in enumerate(reports))
            self._probe_test = StragglerTest(list(by_model.values()))
        new, recovered = self._probe_test.update(
            [report.pace.of_probe(report.probe) for report in reports]
        )
        for straggler in new:
            self._say(describe_probe(straggler, reports[straggler.rank].who))
        for rank in recovered:
            self._say(f"{reports[rank].who}: its GPU is as fast as the others again")

        seconds = [median(report.probe) for report in reports]
        return {
            "gpu_probe_median_s": median(seconds),
            "gpu_probe_max_s": max(seconds),
            "gpu_probe_max_rank": seconds.index(max(seconds)),
        }

    def _post_suspects(self) -> None:
        """Tells the ranks whose GPUs are to be looked at, if they are others than before."""
        suspects = set(self._test.suspects)
        if self._probe_test is not None:
            suspects |= self._probe_test.suspects
        if suspects != self._suspects:
            self._suspects = suspects
            self._store.set(SUSPECTS, json.dumps(sorted(suspects)))

    def _write(self, file: Path, reports: Sequence[Report]) -> None:
        table = {
            "step": reports[0].step,
            "axes": {axis: size for axis, size in self._layout.sizes.items() if size > 1},
            "hosts": [report.pace.host for report in reports],
            "own_time_s": [report.pace.own.middle for report in reports],
            "memory_gib": [report.memory_gib for report in reports],
        }
        with optional("ranks.json could not be written"):
            write_whole(file, json.dumps(table) + "\n")


# What is said -------------------------------------------------------------------------------------


def describe(straggler: Straggler, rank: str, steps: int) -> str:
    pace = straggler.pace
    if straggler.peers == 0:
        others = "at first it took"
    elif straggler.peers == 1:
        others = "the other rank with the same work takes"
    else:
        others = f"the other {straggler.peers} ranks with the same work take"
    known = [
        f"{_ms(pace.data)} waiting for data",
        f"{_ms(pace.queued)} waiting for a core",
        f"load of its host {pace.load:.1f} on {pace.cores} cores",
    ]
    if pace.gpu:
        known.append(pace.gpu)
    return (
        f"warning: {rank} is slow: for {steps} steps now it has taken {_ms(straggler.own)} of its "
        f"own for each, {others} {_ms(straggler.others)}. All ranks wait for it\n"
        f"  known of it: {', '.join(known)}\n"
        f"  what to do: {advice(straggler)}"
    )


def describe_probe(straggler: Straggler, rank: str) -> str:
    """As `describe`, for a GPU that is slow in its probes."""
    others = "the others' take" if straggler.peers else "at first it took"
    return (
        f"warning: the GPU of {rank} is slow: a product of matrices takes {_ms(straggler.own)} on "
        f"it in {LOOKS} looks in a row, {others} {_ms(straggler.others)}. All ranks wait for it\n"
        f"  known of it: {straggler.pace.gpu or 'the driver tells nothing'}\n"
        f"  what to do: {THROTTLED if straggler.pace.throttled else NODE_CHECK}"
    )


def advice(straggler: Straggler) -> str:
    pace = straggler.pace
    if pace.data > straggler.excess / 2:
        return (
            "give data.workers a larger number, and compare how fast the hosts read the corpus "
            "with `meshtrain doctor`"
        )
    if pace.throttled:
        return THROTTLED
    if pace.load > max(pace.cores, 1.5 * straggler.load):
        return (
            "look with top for what else runs there, and give data.workers a smaller number if "
            "those are it"
        )
    return NODE_CHECK


def _ms(seconds: float) -> str:
    if seconds < 0.01:
        return f"{1000 * seconds:.1f} ms"
    return f"{1000 * seconds:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"
