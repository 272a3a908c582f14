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

    def __init__(self, file: Path, what: str, tensor: str | None = None) -> None:
        self.file, self.what, self.tensor = file, what, tensor
        super().__init__(f"{file}: {what}" if tensor is None else f"{file}: {tensor}: {what}")


class TrainingError(RuntimeError):
    """The run cannot go on, and every rank has found that out in the same step. The process ends with exit status 1."""
