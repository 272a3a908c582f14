"""How a run ends, written into its folder: `exit.json` is there for scripts, and for the next start of the same run."""

import signal
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from meshtrain.checkpoint.resume import Resume, Wanted
from meshtrain.config import Config
from meshtrain.errors import AgreedError, InputError, TrainingError
from meshtrain.layout import LayoutError
from meshtrain.leaving import by_signal
from meshtrain.run_folder import RunFolder
from meshtrain.runtime import Job
from meshtrain.side_file import optional

if TYPE_CHECKING:
    from meshtrain.operate.goodput import Ledger

GOES_ON = 1  # the exit status of a process that stops for another node's sake, and is to be started again
STOPPED = 75  # the exit status of a run that was asked to stop and can be gone on with: EX_TEMPFAIL of sysexits.h


class Ending:
    """Around a run: rank 0 forgets how the last job ended, and writes down how this one does.

    A run that is refused before it begins leaves the folder as it was.
    """

    def __init__(self, folder: RunFolder, job: Job) -> None:
        self.folder = folder
        self.job = job
        self.step = 0  # updates done so far
        self.stopped: str | None = None  # on whose request, with everything saved
        self.status = 0  # with which this process ends, if all goes well
        self.ledger: Ledger | None = None
        self._begun = False

    def __enter__(self) -> "Ending":
        return self

    def done_before(self, steps: int, resume: Resume) -> bool:
        """Whether an earlier job has finished this run; rank 0 then says what the user may do.

        Args:
            steps: how many this run is to have.
            resume: what it would go on from.

        Raises:
            InputError: a finished run with another number of steps is in the folder, and no checkpoint to go on from.
        """
        last = None
        with self.job.together("looking at the run's folder"):
            last = self.folder.last_exit() if self.job.rank == 0 and not resume.back else None
            last = last if last is not None and last.get("status") == "done" else None
            if last is not None and last["step"] != steps and resume.checkpoint is None:
                raise InputError(
                    f"{self.folder.path} holds a finished run of {last['step']} steps and no checkpoint of it, and "
                    f"this one has {steps}: name another folder, for instance train.output={self.folder.path}-{steps}"
                )
        done = self.job.gather("looking at the run's folder", last is not None and last["step"] == steps)[0]
        if done:
            self.job.say(
                f"{self.folder.path} is done: {steps} steps. Its loss is in metrics.jsonl and loss.png there.\n"
                f"To start anew, remove the folder or name another:  train.output={self.folder.path}-2\n"
                f"To go further, train longer from its last step:    train.steps={2 * steps}"
            )
        return done

    def stop(self, mine: str | None, checkpoint: Path, wanted: Wanted) -> None:
        """The run was asked to stop, and has: rank 0 says why, where its state is, and how to go on.

        Args:
            mine: what has asked this rank, if something did.
        """
        asked: dict[str, list[str]] = {}
        for rank, what in enumerate(self.job.gather("stopping", mine)):
            if what is not None:
                asked.setdefault(what, []).append(str(rank))
        self.status = STOPPED
        self.stopped = "asked to stop by " + ", and by ".join(
            what if ranks[0] == "0" else f"{what} on rank {', '.join(ranks)}" for what, ranks in asked.items()
        )
        again = "" if wanted.config.checkpoint.resume == "latest" else " with checkpoint.resume=latest"
        self.job.say(
            f"\nstopped after step {self.step} of {wanted.steps}: {self.stopped}\n"
            f"the state is in {checkpoint}\n"
            f"to go on, start the same command again{again}"
        )

    def begin(self, config: Config, layout_table: str, step: int, ledger: "Ledger") -> None:
        """The run is about to start, after `step` updates: from now on its folder says so.

        Its weights or its checkpoint have been read by then: what is wrong with them refuses it.

        Args:
            ledger: that says in the end how the wall time was spent.
        """
        self.step, self.ledger = step, ledger
        with self.job.together("beginning the run"):
            if self.job.rank == 0:
                self.folder.forget_exit()
                for name, text in (("config.yaml", config.to_yaml()), ("layout.txt", layout_table)):
                    with optional(f"{name} could not be written"):
                        self.folder.write(name, text)
        self._begun = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        refused = isinstance(error, InputError | LayoutError)
        if self.job.rank != 0 or (not self._begun and (error is None or refused)):
            return
        if error is None and self.stopped is not None:
            self._write("stopped", STOPPED, self.stopped)
        elif error is None:
            self._write("done", 0, "all steps are done")
        else:
            shared = isinstance(error, AgreedError | TrainingError)  # all ranks have it
            asks = by_signal(error) or (isinstance(error, Exception) and not shared)
            lost = self.job.failures.failed(str(self.job), error) if asks else None
            self._write("failed", 1, _reason(error) if lost is None else lost.reason)

    def lose(self, reason: str) -> None:
        """The job is lost while this rank is stuck, or rank 0 is gone: its folder says so at once.

        For a thread that ends this process next; on any rank, the lowest that is left.
        """
        if self._begun and self.job.rank == 0:
            self._write("failed", 1, reason)
        elif self._begun and not self.folder.has_exit():  # both sides of a cut come here: rank 0's word counts
            self.folder.write_exit("failed", 1, reason, self.step)

    def _write(self, status: str, code: int, reason: str) -> None:
        """On rank 0: into the folder, and how the wall time was spent for people too."""
        if self.ledger is None:
            self.folder.write_exit(status, code, reason, self.step)
            return
        spent = self.ledger.account()
        self.folder.write_exit(status, code, reason, self.step, spent.plain())
        self.ledger.end(status)
        self.job.say(str(spent))


def _reason(error: BaseException) -> str:
    if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code > 128:
        return f"ended by {signal.Signals(error.code - 128).name}"
    return f"{type(error).__name__}: {error}"
