"""The one kind of error that is the user's to mend."""

from pathlib import Path


class InputError(ValueError):
    """Something the user gave is wrong: a config, a data file, a layout. The process ends with exit status 2.

    The message says what was expected, what was found, where, and what would work.
    """


class AgreedError(InputError):
    """Wrong input of which every rank knows, with the same message: all of them raise it, and it is told once."""


class DamagedError(InputError):
    """A checkpoint is not what was written: `file` is missing, cut short or changed, in `tensor` if that is known."""

    def __init__(self, file: Path, problem: str, tensor: str | None = None) -> None:
        self.file, self.problem, self.tensor = file, problem, tensor
        super().__init__(f"{file}: {problem}" if tensor is None else f"{file}: {tensor}: {problem}")


class MissingError(DamagedError):
    """A file that a checkpoint must have is not there, as this host sees it."""

    def __init__(self, file: Path) -> None:
        super().__init__(file, "is missing")


class UnreadableError(OSError):
    """A file cannot be read now, which says nothing about what is in it."""

    def __init__(self, file: object, reason: str | None, tensor: str | None = None) -> None:
        self.file, self.reason, self.tensor = Path(str(file)), reason or "unknown error", tensor
        super().__init__(f"cannot read {file}: {self.reason}")


class TrainingError(RuntimeError):
    """The run cannot go on, and every rank has found that out in the same step. The process ends with exit status 1."""
