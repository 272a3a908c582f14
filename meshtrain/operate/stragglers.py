"""Names the rank that all others wait for: every so often the ranks compare what each takes by itself.

A straggler costs the whole job what it costs itself, and nothing fails: the loss is right, the steps are only longer.
So each rank leaves its times at the job's store after every so many steps, without waiting for anybody, and rank 0
reads them a step later, when all must have come by. `pace` decides; here it is measured, carried and said.
"""

import json
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from statistics import median

import torch

from meshtrain.layout import DATA_AXES
from meshtrain.operate.pace import LOOKS, Looks, Pace, Straggler
from meshtrain.operate.smi import HELD, gpu_condition
from meshtrain.runtime import Job

EVERY = 20  # steps of a look: quartiles of them are steady, and a straggler is named within three looks
RANKS_PER_STEP = 32  # rank 0 reads a word of every rank in a look: in a large world it looks more seldom
FEWEST = 8  # measured steps in a look, below which it tells nothing
WARM_UP = 3  # first steps of a job, which no look has: caches fill, kernels are chosen


class Stragglers:
    """One rank's part in comparing; all ranks call `look` after the same steps."""

    def __init__(self, job: Job, first: int, say: Callable[[str], None]) -> None:
        """
        Args:
            job: with its layout.
            first: the first step of this job.
            say: prints a line, on rank 0.
        """
        assert job.layout is not None  # it was placed
        self._job, self._say = job, say
        self._every = max(EVERY, job.world_size // RANKS_PER_STEP)
        self._begins = first + WARM_UP
        self._last = first - 1  # the step that was measured last
        self._steps: list[Mapping[str, float]] = []
        self._looks = Looks(job.layout.groups(*DATA_AXES)) if job.rank == 0 else None
        self._posted: int | None = None  # the step of the look that rank 0 has not read yet
        self._gpu = _Gpu(job.device)

    def look(self, step: int, times: Mapping[str, float] | None) -> dict[str, float]:
        """Takes the times of a step, all of whose numbers are known. To be called before the next update.

        Args:
            step: the last one whose result was taken; if it was measured already, nothing happens.
            times: as StepClock.pop gives them.

        Returns:
            On rank 0, now and then: what goes into a row of metrics.jsonl.
        """
        if self._job.store is None or times is None or step <= self._last:
            return {}
        self._last = step
        found = self._read() if self._posted is not None else {}
        if step >= self._begins:
            self._steps.append(times)
        if step % self._every == 0:
            self._post(step)
        return found

    def _post(self, step: int) -> None:
        steps, self._steps = self._steps, []
        if len(steps) < FEWEST:  # the same on all ranks
            return
        assert self._job.store is not None
        pace = Pace.of(steps, self._job.host, os.getloadavg()[0], os.cpu_count() or 1, self._gpu.known)
        mine = {"who": str(self._job), "step": step, "pace": asdict(pace)}
        self._job.store.set(f"pace/{self._job.rank}", json.dumps(mine))
        if self._job.rank == 0:
            self._posted = step
        asks = self._gpu.uuid and self._job.store.check(["pace/suspects"])
        if asks and self._job.rank in json.loads(self._job.store.get("pace/suspects")):
            self._gpu.ask()

    def _read(self) -> dict[str, float]:
        """On rank 0, a step after it has posted: this step ended with a sum over all ranks, so all have posted."""
        step, self._posted = self._posted, None
        assert self._job.store is not None
        assert self._looks is not None
        told = self._job.store.multi_get([f"pace/{rank}" for rank in range(self._job.world_size)])
        found = [json.loads(text) for text in told]
        assert all(each["step"] == step for each in found), "all ranks look after the same steps"
        paces = [Pace(**each["pace"]) for each in found]
        before = self._looks.suspects
        new, recovered = self._looks.see(paces)
        if self._looks.suspects != before:
            self._job.store.set("pace/suspects", json.dumps(sorted(self._looks.suspects)))
        for straggler in new:
            self._say(describe(straggler, found[straggler.rank]["who"], LOOKS * self._every))
        for rank in recovered:
            self._say(f"{found[rank]['who']} is as fast as its peers again")
        slowest = max(range(len(paces)), key=lambda rank: paces[rank].middle)
        return {
            "own_time_median_s": median(pace.middle for pace in paces),
            "own_time_max_s": paces[slowest].middle,
            "own_time_max_rank": slowest,
        }


class _Gpu:
    """What nvidia-smi tells of this rank's GPU, asked for in a thread: it may take seconds."""

    def __init__(self, device: torch.device) -> None:
        self.known = ""
        self.uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else ""

    def ask(self) -> None:
        threading.Thread(target=self._ask, name="nvidia-smi", daemon=True).start()

    def _ask(self) -> None:
        self.known = gpu_condition(self.uuid)


def describe(straggler: Straggler, who: str, steps: int) -> str:
    """What is said of a straggler: who, how much it costs, what is known of it, and what to do.

    Args:
        who: the rank with its host and coordinate.
        steps: of the looks in which it was slow.
    """
    pace = straggler.pace
    peers = {0: "at first it took", 1: "the other rank with the same work takes"}
    others = peers.get(straggler.peers, f"the other {straggler.peers} ranks with the same work take")
    known = [f"{_ms(pace.data)} waiting for data", f"{_ms(pace.queued)} waiting for a core"]
    known += [f"load of its host {pace.load:.1f} on {pace.cores} cores"] + ([pace.gpu] if pace.gpu else [])
    return (
        f"warning: {who} is slow: for {steps} steps now it has taken {_ms(straggler.own)} of its own for each, "
        f"{others} {_ms(straggler.others)}. All ranks wait for it\n"
        f"  known of it: {', '.join(known)}\n"
        f"  what to do: {advice(straggler)}"
    )


def advice(straggler: Straggler) -> str:
    """What to do about a straggler, by what is known of it."""
    pace = straggler.pace
    if pace.data > straggler.excess / 2:
        return (
            "give data.workers or data.prefetch a larger number, and compare how fast the hosts "
            "read the corpus with `meshtrain doctor`"
        )
    if HELD in pace.gpu:
        return "see to the cooling and the power of that host (nvidia-smi -q -d PERFORMANCE), or leave it out"
    if pace.load > max(pace.cores, 1.5 * straggler.load):
        return "look with top for what else runs there, and give data.workers a smaller number if those are it"
    return "run `meshtrain doctor --local` on that host when the job is over; leave the host out if it stays slow"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"
