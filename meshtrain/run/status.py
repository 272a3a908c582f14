"""Exit status: how a run ends, written into `exit.json` for scripts and for the next start of the
same run."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from meshtrain.checkpoint.resume import Resume
from meshtrain.checkpoint.run_spec import RunSpec
from meshtrain.config import Config
from meshtrain.config.hub_names import HUB, kept_text
from meshtrain.errors import AgreedError, DiskError, InputError, TrainingError, ranges
from meshtrain.job.exit import signal_of
from meshtrain.job.process import Job
from meshtrain.job.signals import StopKind, StopReason
from meshtrain.job.storage import optional
from meshtrain.job.watchdog.records import Diagnosis, DiagnosisKind
from meshtrain.layout import LayoutError
from meshtrain.metrics.sink_threads import SinkThreads, find_sinks
from meshtrain.metrics.sinks import SinkRun
from meshtrain.run.on_exit import ON_EXIT_S, run_on_exit
from meshtrain.run.run_folder import EXIT, RunFolder

if TYPE_CHECKING:
    from meshtrain.metrics.goodput import GoodputTracker

# the exit status of a process that stops because a node joins, and is to be restarted
EXIT_RESTART = 1
# that sinks, and then the command of train.on_exit, may delay a process that is about to be killed
VERDICT_S = 2.0
# the exit status of a run that was asked to stop and can be resumed: EX_TEMPFAIL of sysexits.h
STOPPED = 75


class RunStatus(AbstractContextManager["RunStatus"]):
    """Wraps a run: rank 0 records how it ends, replacing the last record, unless the run is refused
    at its start."""

    def __init__(self, folder: RunFolder, job: Job, on_exit: str | None = None) -> None:
        self.folder = folder
        self.job = job
        self._on_exit = on_exit
        self._sinks: SinkThreads | None = None
        self.stopped: str | None = None  # on which requests, once everything is saved
        self.stop_kinds: list[StopKind] = []  # of these requests
        self.status = 0  # the exit status of this process, if all goes well
        self._goodput: GoodputTracker | None = None  # set once the run has begun

    @property
    def step(self) -> int:
        return 0 if self._goodput is None else self._goodput.finished_step

    def already_finished(self, steps: int, resume: Resume, config: Config) -> bool:
        """Whether an earlier job has finished this run of `steps` steps; rank 0 then prints what
        the user can do. Raises InputError: the folder holds a finished run of another number of
        steps, and no checkpoint of it."""
        last_step = None  # of a finished run
        with self.job.collective_check("looking at the run's folder"):
            if self.job.rank == 0 and not resume.back:
                last_step = self._finished_step()
            if last_step not in (None, steps) and resume.checkpoint is None:
                raise InputError(
                    f"{self.folder.path} holds a finished run of {last_step} steps and no "
                    f"checkpoint of it, and this one has {steps}: name another folder, for "
                    f"instance train.output={self.folder.path}-{steps}"
                )
        rank_0 = itemgetter(0)
        done = self.job.reduce("looking at the run's folder", last_step == steps, rank_0)
        if done:
            self._say_finished(steps, config)
        return done

    def _finished_step(self) -> int | None:
        """The last step of the finished run in the folder; None: there is none."""
        last = self.folder.last_exit()
        if last is None or last.get("status") != "done":
            return None
        return last["step"]

    def _say_finished(self, steps: int, config: Config) -> None:
        self.job.say(
            f"{self.folder.path} is done: {steps} steps. Its loss is in metrics.jsonl and "
            "loss.png there.\n"
            "To start anew, remove the folder or name another:  "
            f"train.output={self.folder.path}-2\n"
            f"To go further, train longer from its last step:    train.steps={2 * steps}"
        )
        export = config.train.export
        if export is not None and not Path(export).expanduser().exists():
            command = f"meshtrain export {self.folder.path} {export}"
            if config.train.use_ema:
                command += " --ema"
            self.job.say(f"There is no {export} (train.export) yet:  {command}")

    def stop(self, own_reason: StopReason | None, checkpoint: Path, spec: RunSpec) -> None:
        """The run has stopped: rank 0 prints why, and how to resume. `own_reason`: why this rank
        was asked to stop."""
        own = None if own_reason is None else [own_reason.kind, own_reason.text]
        requests: dict[str, list[int]] = {}  # reason -> the ranks that were asked
        for rank, reason in enumerate(self.job.gather("stopping", own)):
            if reason is not None:
                kind, text = reason
                requests.setdefault(text, []).append(rank)
                self.stop_kinds.append(StopKind(kind))
        self.status = STOPPED
        asked = []
        for text, ranks in requests.items():
            asked.append(text if ranks[0] == 0 else f"{text} on rank {', '.join(ranges(ranks))}")
        self.stopped = f"asked to stop by {', and by '.join(asked)}"
        again = ""
        if spec.config.checkpoint.resume != "latest":
            again = " with checkpoint.resume=latest"
        self.job.say(
            f"\nstopped after step {self.step} of {spec.steps}: {self.stopped}\n"
            f"the state is in {checkpoint}\n"
            f"to go on, start the same command again{again}"
        )

    def begin(self, config: Config, layout_table: str, goodput: "GoodputTracker") -> None:
        """The run is about to start, with weights or a checkpoint already read: from now on its
        folder shows that."""
        with self.job.collective_check("beginning the run"):
            if self.job.rank == 0:
                self.folder.forget_exit()
                files = {"config.yaml": config.to_yaml(), "layout.txt": layout_table}
                if config.hub:
                    files[HUB] = kept_text(config.hub)
                for name, text in files.items():
                    with optional(f"{name} could not be written"):
                        self.folder.write(name, text)
        self._goodput = goodput

    def open_sinks(self, config: Config, steps: int, step: int) -> SinkThreads:
        """Opens the sinks of the config, on rank 0. This object closes them, as it knows how the
        run ends."""
        run = SinkRun(config.name, self.folder.path, steps, step, config.plain())
        self._sinks = SinkThreads(find_sinks(config.metrics), run)
        return self._sinks

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.job.rank != 0:
            return
        if self._goodput is None and (error is None or _is_input(error)):
            return  # nothing has begun, or the run is refused
        if error is not None:
            self._write_error(error)
        elif self.stopped is not None:
            kind = self.stop_kinds[0] if self.stop_kinds else "stopped"
            self._write("stopped", STOPPED, self.stopped, kind)
        else:
            self._write("done", 0, "all steps are done", "done")

    def _write_error(self, error: BaseException) -> None:
        """Records an error of this rank, or the failure of another one that it follows from."""
        by_all_ranks = isinstance(error, AgreedError | TrainingError)
        is_fault = isinstance(error, Exception) and not by_all_ranks
        # An error that all ranks raise needs no diagnosis; of another one, or of a signal, the
        # watchdog may know the cause on another rank.
        first = None
        if is_fault or signal_of(error) is not None:
            first = self.job.failures.first_failure(str(self.job), error)
        if first is not None:
            diagnosis = first.diagnosis
            if diagnosis.kind == DiagnosisKind.INPUT and self._goodput is None:
                return  # another rank has refused the run
            self._write("failed", 1, diagnosis.headline, diagnosis.kind, diagnosis.hosts)
            return
        reason, kind = _reason(error)
        is_of_host = not by_all_ranks and not _is_input(error)
        hosts = (self.job.host,) if is_of_host else ()
        self._write("failed", 1, reason, kind, hosts)

    def write_failed(self, diagnosis: Diagnosis) -> None:
        """The job is lost while this rank is stuck, or rank 0 is gone; called on the lowest
        surviving rank."""
        # Where a link is cut, both sides call this, and the exit.json of rank 0 counts.
        if self._goodput is None:
            return
        if self.job.rank == 0 or not (self.folder.path / EXIT).exists():
            self._write("failed", 1, diagnosis.headline, diagnosis.kind, diagnosis.hosts, VERDICT_S)

    def _write(
        self,
        status: str,
        code: int,
        reason: str,
        kind: str,
        hosts: Sequence[str] = (),
        limit_s: float = ON_EXIT_S,
    ) -> None:
        """`limit_s`: for the sinks to close, and then for train.on_exit."""
        goodput = None
        if self.job.rank == 0:  # only it has the run's ledger
            goodput = self._goodput
        row = None
        summary = None
        if goodput is not None:
            summary = goodput.summary()
            row = summary.row() | {"jobs": summary.jobs}
        end = self.folder.write_exit(status, code, reason, self.step, row, kind=kind, hosts=hosts)
        if goodput is not None:
            goodput.end(status)
            self.job.say(str(summary))
        if self._sinks is not None:
            self._sinks.close(status, limit_s)
        if self._on_exit is not None:
            run_on_exit(self._on_exit, end, self.folder.path, limit_s)
            self._on_exit = None


def _is_input(error: BaseException) -> bool:
    return isinstance(error, InputError | LayoutError)


def _reason(error: BaseException) -> tuple[str, DiagnosisKind]:
    text = f"{type(error).__name__}: {error}"
    signal_name = signal_of(error)
    if isinstance(error, SystemExit) and signal_name is not None:
        text = f"ended by {signal_name}"
    if signal_name is not None:
        return text, DiagnosisKind.ENDED
    if _is_input(error):
        return text, DiagnosisKind.INPUT
    is_final = isinstance(error, TrainingError) and not isinstance(error, DiskError)
    return text, DiagnosisKind.TRAINING if is_final else DiagnosisKind.FAILED
