"""The one kind of error that is the user's to mend."""


class InputError(ValueError):
    """Something the user gave is wrong: a config, a data file, a layout. The process ends with exit status 2.

    The message says what was expected, what was found, where, and what would work.
    """


class AgreedError(InputError):
    """Wrong input of which every rank knows, with the same message: all of them raise it, and it is told once."""


class TrainingError(RuntimeError):
    """The run cannot go on, and every rank has found that out in the same step. The process ends with exit status 1."""
