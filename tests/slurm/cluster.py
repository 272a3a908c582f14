"""A real SLURM on one machine: slurmctld, a slurmd on each of a few hosts made of namespaces, and
munge.

    with Cluster(tmp_path) as cluster:
        job = cluster.sbatch("tools/slurm/train.sbatch", "configs/quickstart.yaml")
        cluster.wait(job)

The hosts are those of `tests/nethosts.py`; SLURM's nodes have their names. To SLURM, each has 4
CPUs and 2 GPUs. Jobs of the partition `high` preempt those of `main`, the default. The machine's
own SLURM and munge stay untouched: key, socket, state and logs are in the cluster's folder, and all
processes end with the cluster. Needs root, and slurmctld, slurmd, slurm-client and munge, as Debian
packages them; `python -m tests.slurm.cluster` starts a cluster and a shell in it.
"""

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from tests.launching import ROOT, environment
from tests.nethosts import Network
from tests.nethosts import why_not as why_no_hosts

PROGRAMS = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "munged": "munge",
}
GPUS = 2  # per node; empty files stand in for devices

CONF = """
ClusterName=test
SlurmctldHost=node1
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
# These hosts have no cgroups and no systemd, and there may be fewer cores than the nodes say.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
# It has to be quick, and what goes wrong on a node must not keep it from the next test.
ReturnToService=2
SchedulerParameters=bf_interval=1,sched_interval=2,batch_sched_delay=0
CompleteWait=0
KillWait=60
SlurmdTimeout={lost_after}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{lines}
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 GraceTime=120
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""


def why_not() -> str | None:
    """Why this machine cannot have a cluster; None if it can."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    missing = [
        package for program, package in PROGRAMS.items() if shutil.which(program, path=path) is None
    ]
    return f"needs the packages {', '.join(missing)}" if missing else why_no_hosts()


class Cluster:
    """Nodes node1, node2, ..., and the commands of users."""

    def __init__(
        self,
        folder: Path,
        *,
        nodes: int = 2,
        lost_after_s: int = 60,
        gpus: Mapping[int, int] | None = None,
    ) -> None:
        """`folder` is for the files of the cluster.

        Args:
            lost_after_s: how long a node may be silent before SLURM considers it lost.
            gpus: node -> number of GPUs, for nodes that differ from the others.
        """
        self.folder = folder.resolve()
        socket = f"{self.folder}/spool.node{nodes}/node{nodes}_99.4294967291"
        assert len(socket) < 108, (
            f"Unix takes no socket with so long a path, and SLURM starts no step: {socket}"
        )
        self._nodes = nodes
        self._network = Network(nodes, self.folder)
        self._munged: subprocess.Popen[bytes] | None = None
        self._gpus = {node: (gpus or {}).get(node, GPUS) for node in self._network.hosts}
        lines = [
            f"NodeName=node{node} CPUs=4 RealMemory=1000 Gres=gpu:{have} State=UNKNOWN"
            for node, have in self._gpus.items()
        ]
        self._settings = {
            "folder": self.folder,
            "lines": "\n".join(lines),
            "lost_after": lost_after_s,
        }

    def __enter__(self) -> "Cluster":
        try:
            self._write()
            self._munged = self._authenticate()
            self._network.__enter__()
            self._start(1, "slurmctld", "-D", "-i")
            for node in self._network.hosts:
                self._start(node, "slurmd", "-D", "-N", f"node{node}")
            self._ready()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *raised: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._network.__exit__()
        if self._munged is not None:
            self._munged.kill()
            self._munged.wait()

    def _write(self) -> None:
        (self.folder / "state").mkdir(parents=True)
        (self.folder / "slurm.conf").write_text(CONF.format(**self._settings))
        for gpu in range(GPUS):
            (self.folder / f"gpu{gpu}").touch()
        lines = [
            f"NodeName=node{node} Name=gpu File={self.folder}/gpu[0-{have - 1}]"
            for node, have in self._gpus.items()
        ]
        (self.folder / "gres.conf").write_text("\n".join(lines) + "\n")
        # Set explicitly: otherwise slurmd detects the cgroup version and does not start where none
        # is mounted.
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")

    def _authenticate(self) -> subprocess.Popen[bytes]:
        """Starts munge with a key of its own. It requires folders that nobody else may write to."""
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        files = {
            "key-file": key.name,
            "socket": "munge.socket",
            "pid-file": "munge.pid",
            "seed-file": "munge.seed",
        }
        options = [f"--{option}={self.folder / name}" for option, name in files.items()]
        with (self.folder / "munged.log").open("wb") as log:
            daemon = subprocess.Popen(
                ["/usr/sbin/munged", "--foreground", "--force", *options],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return daemon

    def _start(self, node: int, *daemon: str) -> None:
        """Starts a daemon on a node; it ends with the node."""
        with (self.folder / f"{daemon[0]}.node{node}.log").open("wb") as log:
            subprocess.Popen(
                self._network.on(node, *daemon),
                env=self.variables(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _ready(self) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            asked = subprocess.run(
                self._network.on(
                    1,
                    "sinfo",
                    "--noheader",
                    "--Node",
                    "--partition=main",
                    "--states=idle",
                    "--format=%N",
                ),
                env=self.variables(),
                capture_output=True,
                text=True,
                check=False,
            )
            if len(asked.stdout.split()) == self._nodes:
                return
            time.sleep(0.2)
        logs = "\n".join(
            f"--- {log}\n{log.read_text()[-3000:]}" for log in self.folder.glob("*.log")
        )
        raise RuntimeError(f"the cluster did not come up: {asked.stdout}{asked.stderr}\n{logs}")

    def variables(self, **extra: str) -> dict[str, str]:
        """The environment for SLURM's commands and daemons here."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin"
        return environment(PATH=path, SLURM_CONF=str(self.folder / "slurm.conf"), **extra)

    # Use ------------------------------------------------------------------------------------------

    def on(self, *command: str, cwd: Path = ROOT) -> list[str]:
        """A command line that runs a command on node1, in the folder `cwd`."""
        return self._network.on(1, "sh", "-c", 'cd "$0" && exec "$@"', str(cwd), *command)

    def ask(self, *command: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> str:
        """The output of a command on node1.

        Raises:
            RuntimeError: it failed; with its output.
        """
        done = subprocess.run(
            self.on(*command, cwd=cwd),
            env=self.variables(**(env or {})),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(
                f"{command} ended with {done.returncode}: {done.stdout}{done.stderr}"
            )
        return done.stdout

    def sbatch(self, *words: str, env: Mapping[str, str] | None = None) -> str:
        """Submits a job, from the root of the repository; returns its number."""
        return self.ask("sbatch", "--parsable", *words, env=env).strip()

    def job(self, job: str) -> dict[str, str]:
        """What SLURM knows about a job: JobState, Restarts, ExitCode, ..."""
        return dict(
            word.split("=", 1)
            for word in self.ask("scontrol", "show", "job", job).split()
            if "=" in word
        )

    def wait(
        self, job: str, until: Callable[[dict[str, str]], bool] | None = None, seconds: float = 400
    ) -> dict[str, str]:
        """Waits until `until` is true of a job, by default until it has ended for good; returns
        what SLURM knows of it.

        Raises:
            AssertionError: it did not become true in time, or the job has ended before; with what
                SLURM knows.
        """
        deadline = time.monotonic() + seconds
        while not (until or _ended)(found := self.job(job)):
            assert not _ended(found), f"job {job} has ended: {found}"
            assert time.monotonic() < deadline, f"job {job} after {seconds} s: {found}"
            time.sleep(0.3)
        return found

    def end(self, job: str) -> None:
        """Cancels and kills a job, unless it has ended."""
        if not _ended(self.job(job)):
            self.ask("scancel", job)
            subprocess.run(
                self.on("scancel", "--signal=KILL", "--full", job),
                env=self.variables(),
                check=False,
            )
            self.wait(job)

    def lose(self, node: int) -> None:
        """Kills a node with all its processes."""
        self._network.kill(node)

    def start_again(self, job: str, restarts: int) -> None:
        """Waits until a job has been requeued `restarts` times, and starts it, which would take two
        more minutes."""
        self.wait(
            job, lambda found: found["Restarts"] == str(restarts) and found["JobState"] == "PENDING"
        )
        # within the same second, nodes mistake it for the previous start and refuse it
        time.sleep(3)
        self.ask("scontrol", "update", f"JobId={job}", "StartTime=now")


def _ended(job: dict[str, str]) -> bool:
    return job["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        with Cluster(Path(folder)) as cluster:
            print(
                "two nodes, partitions main and high; the cluster ends with this shell", flush=True
            )
            subprocess.run(cluster.on("bash"), env=cluster.variables(), check=False)
