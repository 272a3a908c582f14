"""Runs a script as a job of several processes on this machine, forked from one that has imported
torch: importing it in each process would take longer than most tests.

    python tests/forked.py PROCESSES SCRIPT [ARGUMENT ...]    or -m MODULE instead of the script
    python tests/forked.py --serve DESCRIPTOR                 jobs, one after the other, that are
                                                              requested over a socket

The environment is that of torchrun, and as under torchrun, the other processes are ended when one
fails. Commands for users are tested under torchrun itself.
"""

import atexit
import gc
import json
import os
import runpy
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

import torch._inductor.compile_fx  # noqa: F401  imports torch, and what runs and plans import later

import meshtrain.run.results
import meshtrain.train
from tests.launching import free_port

# The picture at the end of a run takes longer than all its steps; tests under torchrun draw it.
meshtrain.run.results.plot_loss = lambda *_: "no picture is drawn"


def main(processes: int, script: str, *arguments: str) -> int:
    job = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(processes),
    }
    # Keeps collections in a child from traversing all of torch, which is slow and copies its
    # memory; also after training has undone its own freezing.
    gc.freeze()
    gc.unfreeze = lambda: None
    running = set()
    for rank in range(processes):
        pid = os.fork()
        if pid == 0:
            os.environ.update(
                job, RANK=str(rank), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(processes)
            )
            call_and_end(lambda: run(script, *arguments))
        running.add(pid)
    worst = 0
    while running:
        pid, status = os.wait()
        running.remove(pid)
        if status != 0 and worst == 0:
            worst = os.waitstatus_to_exitcode(status)
            for other in running:
                os.kill(other, signal.SIGTERM)
    return worst if worst >= 0 else 128 - worst


def call_and_end(call: Callable[[], int | None]) -> NoReturn:
    """Ends this process with what a function returns, raises, or hands to `sys.exit`.

    Python would now take everything down, torch's 100,000s of objects among it, and so copy each
    page of memory that this process shares with the one that it was forked from. That takes longer
    than most jobs."""
    try:
        status = call()
    except SystemExit as exit:
        status = exit.code if isinstance(exit.code, int | None) else 1
        if isinstance(exit.code, str):
            print(exit.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    # What Python does before, in its order.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)


def run(script: str, *arguments: str) -> None:
    """Runs what `python SCRIPT ARGUMENTS` would run."""
    if script == "-m":
        sys.argv = list(arguments)
        sys.modules.pop(arguments[0], None)  # it is run as `__main__` rather than imported
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [script, *arguments]
        sys.path[0] = os.path.dirname(script)
        runpy.run_path(script, run_name="__main__")


def serve(descriptor: int) -> list[str]:
    """Forks a process for each requested job (`launching.ForkServer`) and answers with its pid,
    later with its status. Returns only in the forked process, with the arguments of the job."""
    with socket.socket(fileno=descriptor) as requests:
        while True:
            request, files, _, _ = socket.recv_fds(requests, 1 << 20, 2)
            if not request:
                sys.exit()
            job = json.loads(request)
            pid = os.fork()
            if pid == 0:
                break
            for file in files:
                os.close(file)
            requests.send(json.dumps(pid).encode())
            requests.send(json.dumps(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
    os.setsid()
    for file, standard in zip(files, (1, 2), strict=True):
        os.dup2(file, standard)
        os.close(file)
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    return job["arguments"]


if __name__ == "__main__":
    job_arguments = sys.argv[1:]
    if job_arguments[0] == "--serve":
        job_arguments = serve(int(job_arguments[1]))
    processes, script, *arguments = job_arguments
    call_and_end(lambda: main(int(processes), script, *arguments))
