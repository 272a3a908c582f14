"""How a run ends, written into its folder: `exit.json` is there for scripts, and for the next start of the same run."""

import signal
from types import TracebackType

from meshtrain.config import Config
from meshtrain.errors import InputError
from meshtrain.run_folder import RunFolder
from meshtrain.runtime import Job


class Ending:
    """Around a run: rank 0 forgets how the last job ended, and writes down how this one does.

    A run that is refused before it begins leaves the folder as it was.
    """

    def __init__(self, folder: RunFolder, job: Job) -> None:
        self.folder = folder
        self.job = job
        self.step = 0  # updates done so far
        self._begun = False

    def __enter__(self) -> "Ending":
        return self

    def done_before(self, steps: int) -> bool:
        """Whether an earlier job has finished this run; rank 0 then says what the user may do.

        Args:
            steps: how many this run is to have.

        Raises:
            InputError: a finished run with another number of steps is in the folder.
        """
        last = None
        with self.job.together("looking at the run's folder"):
            last = self.folder.last_exit() if self.job.rank == 0 else None
            if last is not None and last.get("status") == "done" and last["step"] != steps:
                raise InputError(
                    f"{self.folder.path} holds a finished run of {last['step']} steps, and this one has {steps}: "
                    f"name another folder, for instance train.output={self.folder.path}-{steps}"
                )
        done = self.job.gather("looking at the run's folder", last is not None and last.get("status") == "done")[0]
        if done:
            self.job.say(
                f"{self.folder.path} is done: {steps} steps. Its loss is in metrics.jsonl and loss.png there.\n"
                f"To start anew, remove the folder or name another:  train.output={self.folder.path}-2\n"
                f"To go further, train longer in another folder:     "
                f"train.steps={2 * steps} train.output={self.folder.path}-{2 * steps}"
            )
        return done

    def begin(self, config: Config, layout_table: str) -> None:
        """The run is about to start: from now on its folder says so."""
        if self.job.rank == 0:
            self.folder.forget_exit()
            self.folder.write("config.yaml", config.to_yaml())
            self.folder.write("layout.txt", layout_table)
        self._begun = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.job.rank != 0 or not self._begun:
            return
        if error is None:
            self.folder.write_exit("done", 0, "all steps are done", self.step)
        else:
            culprit = self.job.failed_before(error) if isinstance(error, Exception) else None
            self.folder.write_exit("failed", 1, culprit or _reason(error), self.step)


def _reason(error: BaseException) -> str:
    if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code > 128:
        return f"ended by {signal.Signals(error.code - 128).name}"
    return f"{type(error).__name__}: {error}"
