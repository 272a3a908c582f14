"""Starts jobs of several processes for tests, with a time limit, and checks that no process is left
behind."""

import atexit
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[1]
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
# in the environment of every process of a job, by which stragglers are found
MARK = "meshtrainTEST_JOB"
LAUNCHERS = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_",
    "TORCHELASTIC",
)


@dataclass(frozen=True)
class Finished:
    """A job that has ended: its exit status and what it printed."""

    status: int
    out: str
    err: str

    def check(self) -> "Finished":
        """Fails the test, with everything that was printed, unless the job ended well."""
        assert self.status == 0, (
            f"exit status {self.status}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"
        )
        return self


def root_cause(printed: str) -> str:
    """What torchrun's report says of the rank that has failed first."""
    (cause,) = re.findall(
        r"Root Cause \(first observed failure\):.*?traceback : (.*?)\n=", printed, re.DOTALL
    )
    return cause


def environment(**extra: str) -> dict[str, str]:
    """The environment for a job: one thread per process, no GPU unless requested, and no variable
    of a launcher that runs the tests themselves."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    own = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    return kept | own | extra


def run(
    command: Sequence[str],
    *,
    timeout: float = 240,
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
) -> Finished:
    """Runs one command to its end."""
    return run_together([command], timeout=timeout, env=env, cwd=cwd)[0]


def run_together(
    commands: Sequence[Sequence[str]],
    *,
    timeout: float = 240,
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
) -> list[Finished]:
    """Runs commands concurrently, for instance the agents of several hosts; none of their processes
    survives."""
    mark = uuid.uuid4().hex
    jobs = [
        subprocess.Popen(
            command,
            cwd=cwd,
            env=environment(**(env or {})) | {MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        for command in commands
    ]
    deadline = time.monotonic() + timeout
    try:
        outputs = [job.communicate(timeout=max(1.0, deadline - time.monotonic())) for job in jobs]
    except subprocess.TimeoutExpired as expired:
        for job in jobs:
            os.killpg(job.pid, signal.SIGKILL)
        kill_marked(mark)
        printed = [job.communicate() for job in jobs]
        raise AssertionError(f"not done within {timeout} s: {expired.cmd}\n{printed}") from expired
    left = wait_until_gone(mark)
    kill_marked(mark)
    assert not left, f"processes left behind by {commands}: {left}"
    return [
        Finished(job.returncode, out, err) for job, (out, err) in zip(jobs, outputs, strict=True)
    ]


def torchrun(
    processes: int, *arguments: str, timeout: float = 240, env: Mapping[str, str] | None = None
) -> Finished:
    """A job on this host."""
    return run(
        [*TORCHRUN, "--standalone", f"--nproc-per-node={processes}", *arguments],
        timeout=timeout,
        env=env,
    )


class ForkServer:
    """A process that has imported torch once, and forks the tests' jobs one after the other
    (forked.py)."""

    def __init__(self) -> None:
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            self.process = subprocess.Popen(
                [sys.executable, str(ROOT / "tests" / "forked.py"), "--serve", str(other.fileno())],
                cwd=ROOT,
                env=environment(),
                stdin=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                start_new_session=True,
            )

    def run(self, arguments: Sequence[str], *, timeout: float, cwd: Path) -> Finished:
        mark = uuid.uuid4().hex
        request = {"arguments": arguments, "cwd": str(cwd), "env": environment() | {MARK: mark}}
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:

            def printed() -> list[str]:
                for file in (out, err):
                    file.seek(0)
                return [file.read().decode(errors="replace") for file in (out, err)]

            socket.send_fds(
                self._socket, [json.dumps(request).encode()], [out.fileno(), err.fileno()]
            )
            session = self._receive(240)  # it may still be importing torch
            try:
                status = self._receive(timeout)
                left = wait_until_gone(mark, session=session)
            except TimeoutError as expired:
                raise AssertionError(
                    f"not done within {timeout} s: {arguments}\n{printed()}"
                ) from expired
            finally:
                kill_marked(mark, session)
            assert not left, f"processes left behind by {arguments}: {left}"
            return Finished(status, *printed())

    def _receive(self, timeout: float) -> int:
        self._socket.settimeout(timeout)
        answer = self._socket.recv(64)
        assert answer, "the process that forks jobs has ended"
        return json.loads(answer)

    def close(self) -> None:
        self._socket.close()
        self.process.kill()
        self.process.wait()


_idle_servers: list[ForkServer] = []  # concurrent jobs have a server each


def forked(
    processes: int, *arguments: str | Path, timeout: float = 240, cwd: Path = ROOT
) -> Finished:
    """A job on this host that starts faster than under torchrun (forked.py), for tests that do not
    test starting."""
    try:
        server = _idle_servers.pop()
    except IndexError:
        server = ForkServer()
        atexit.register(server.close)
    try:
        done = server.run([str(part) for part in (processes, *arguments)], timeout=timeout, cwd=cwd)
    except BaseException:
        server.close()  # it may be in the middle of a job, whose status can no longer be received
        raise
    _idle_servers.append(server)
    return done


def side_by_side(*calls: Callable[[], T]) -> list[T]:
    """Calls functions concurrently and returns their results: for jobs that leave a core idle at
    times."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [done.result() for done in [pool.submit(call) for call in calls]]


def two_hosts(counts: tuple[int, int], *arguments: str, timeout: float = 240) -> list[Finished]:
    """A job under two agents with these numbers of processes, as on two hosts."""
    port = free_port()
    return run_together(
        [
            [
                *TORCHRUN,
                "--nnodes=2",
                f"--node-rank={node}",
                f"--nproc-per-node={count}",
                "--master-addr=127.0.0.1",
                f"--master-port={port}",
                *arguments,
            ]
            for node, count in enumerate(counts)
        ],
        timeout=timeout,
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(there: Callable[[], bool], seconds: float = 120) -> None:
    """Waits until something has come."""
    deadline = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)


def marked(mark: str, session: int | None = None) -> list[int]:
    """The living processes of a job or of a session (zombies do not count)."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, of_session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            in_session = int(of_session) == session and state != "Z"
            if in_session or f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:  # it has ended meanwhile, or is a zombie
            continue
    return found


def wait_until_gone(mark: str, seconds: float = 60, session: int | None = None) -> list[int]:
    """The processes left of a job after a while; DataLoader's workers notice within seconds that
    their parent ended."""
    deadline = time.monotonic() + seconds
    while (left := marked(mark, session)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def kill_marked(mark: str, session: int | None = None) -> None:
    for pid in marked(mark, session):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
