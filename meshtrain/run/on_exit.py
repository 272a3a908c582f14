"""`train.on_exit`: a user's command that is told how a run has ended, to send a mail for
instance."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshtrain.job.storage import warn

ON_EXIT_S = 30.0


def run_on_exit(
    command: str, end: Mapping[str, Any], folder: Path, wait_s: float = ON_EXIT_S
) -> None:
    """Runs a shell command, which is killed after ON_EXIT_S. `end`: the fields of exit.json. A
    failure is only printed.

    `wait_s`: how long this process waits for the command, which then runs on, even if this process
    is killed.
    """
    path = folder.absolute() / "exit.json"
    variables = {key: end[key] for key in ("status", "code", "kind", "step")}
    variables |= {"exit_json": path, "run": path.parent, "reason": end["reason"].replace("\0", " ")}
    named = {f"MESHTRAIN_{name.upper()}": str(value) for name, value in variables.items()}
    environment = os.environ | named
    # `timeout` limits it, not this process: if the job is lost, this process may end before the
    # command does.
    limited = ["timeout", "--kill-after=2", str(ON_EXIT_S), "sh", "-c", command]
    try:
        process = subprocess.Popen(
            limited, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
        )
        # Where it is waited for to its end, `timeout` gets time to kill it.
        code = process.wait(wait_s if wait_s < ON_EXIT_S else ON_EXIT_S + 5)
    except subprocess.TimeoutExpired:
        return
    except OSError as error:
        warn(f"train.on_exit could not be started: {error}")
        return
    if code:
        problem = f"has ended with status {code}"
        if code in (124, 137):  # those of `timeout`
            problem = f"took more than {ON_EXIT_S:g} s and was ended"
        warn(f"train.on_exit: {command!r} {problem}; {path} has how the run ended")
