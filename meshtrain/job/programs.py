"""External programs with a hard time limit: one that cannot be killed (stuck in a driver) is left
behind."""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress


class ProgramError(RuntimeError):
    """A program is missing, failed, or did not end in time: the text says which."""


def run_program(command: Sequence[str], seconds: float) -> str:
    """The stdout of a program. Raises ProgramError. `subprocess.run` would wait for one that
    SIGKILL does not end."""
    name = command[0]
    path = shutil.which(name)
    if path is None:
        raise ProgramError(f"there is no {name} on this host")
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                [path, *command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
        except OSError as error:
            raise ProgramError(f"{name} cannot be started: {error.strerror or error}") from error
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):  # it has just ended
                os.killpg(process.pid, signal.SIGKILL)
            raise ProgramError(f"{name} did not end within {seconds:g} s") from None
        output.seek(0)
        errors.seek(0)
        printed = output.read().decode("utf-8", errors="replace")
        problem = errors.read().decode("utf-8", errors="replace")
    if status != 0:
        last = (problem or printed).strip()[-500:]
        raise ProgramError(f"{name} has failed, with exit status {status}: {last}")
    return printed
