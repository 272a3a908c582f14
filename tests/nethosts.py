"""Several hosts on one machine, made of Linux namespaces, and faults between them.

Each host has its own network, hostname, processes and mounts. A bridge in a separate namespace
connects them, so that the machine's own network stays untouched and several tests may run at once.
Hosts are `node1`, `node2`, ... at 10.77.0.1, 10.77.0.2, ..., and each has its own /etc/hosts with
all names. Needs root and iproute2.

    with Network(2, tmp_path) as network:
        finished = run_together([network.on(1, "hostname"), network.on(2, "ping", "-c1", "node1")])
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

SUBNET, OTHER_SUBNET = "10.77.0", "10.88.0"
TOOLS = ("ip", "nsenter", "unshare", "setpriv", "mount")


def why_not() -> str | None:
    """Why this machine cannot make hosts; None if it can."""
    if os.geteuid() != 0:
        return "making hosts out of namespaces needs root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"making hosts out of namespaces needs {', '.join(missing)} (iproute2, util-linux)"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True, check=False
    )
    return (
        None
        if tried.returncode == 0
        else f"this machine allows no namespaces: {tried.stderr.decode().strip()}"
    )


class Network:
    """Hosts and the bridge between them. `folder` is for their files; leaving the context kills all
    their processes."""

    def __init__(self, hosts: int, folder: Path, *, second: bool = False) -> None:
        """`second`: every host also gets an interface eth1, which is connected to nothing."""
        self._folder = folder
        self._count = hosts
        self._second = second
        self._holders: list[subprocess.Popen[bytes]] = []
        self._switch = 0
        self._pids: dict[
            int, int
        ] = {}  # host -> pid of its first process, in the machine's own pid namespace

    def __enter__(self) -> "Network":
        try:
            self._build()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *raised: type[BaseException] | BaseException | TracebackType | None) -> None:
        for holder in self._holders:
            # --kill-child also kills the host's first process, which takes all others with it
            holder.kill()
            holder.wait()

    def _build(self) -> None:
        self._switch = self._hold("ip link set lo up && exec sleep infinity")
        self._in_switch("ip", "link", "add", "bridge", "type", "bridge")
        self._in_switch("ip", "link", "set", "bridge", "up")
        names = "".join(f"{self.address(i)} node{i}\n" for i in self.hosts)
        for i in self.hosts:
            self._file(i, "hosts").write_text(f"127.0.0.1 localhost\n{names}")
            # No DNS: a resolver that cannot be reached costs seconds for every name.
            self._file(i, "nsswitch.conf").write_text("hosts: files\n")
            mounts = " && ".join(
                f"mount --bind '{self._file(i, name)}' /etc/{name}" for name in self._files
            )
            self._pids[i] = self._hold(
                f"hostname node{i} && {mounts} && ip link set lo up && exec sleep infinity"
            )
            self._wire(i, "eth0", self.address(i), bridge=True)
            if self._second:
                self._wire(i, "eth1", f"{OTHER_SUBNET}.{i}", bridge=False)

    _files = ("hosts", "nsswitch.conf")

    @property
    def hosts(self) -> range:
        return range(1, self._count + 1)

    @staticmethod
    def address(host: int) -> str:
        return f"{SUBNET}.{host}"

    def _file(self, host: int, name: str) -> Path:
        return self._folder / f"node{host}.{name}"

    def _hold(self, script: str) -> int:
        """Starts a namespace's first process; returns its pid once the script has reached its last
        command."""
        # dies with the process that runs the tests, however that ends
        dies = [
            "setpriv",
            "--pdeathsig",
            "KILL",
        ]
        command = [
            "unshare",
            "--net",
            "--uts",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
        ]
        holder = subprocess.Popen([*dies, *command, "sh", "-c", script], stdin=subprocess.DEVNULL)
        self._holders.append(holder)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and holder.poll() is None:
            children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()
            if children and Path(f"/proc/{children[0]}/comm").read_text().strip() == "sleep":
                return int(children[0])
            time.sleep(0.01)
        raise RuntimeError(f"could not make a host: {script}")

    def _in_switch(self, *command: str) -> None:
        subprocess.run(["nsenter", "-t", str(self._switch), "--net", "--", *command], check=True)

    def _wire(self, host: int, name: str, address: str, bridge: bool) -> None:
        end = f"{name}-{host}"
        peer = ("peer", "name", name, "netns", str(self._pids[host]))
        self._in_switch("ip", "link", "add", end, "type", "veth", *peer)
        self._in_switch("ip", "link", "set", end, *(("master", "bridge") if bridge else ()), "up")
        self.do(host, "ip", "address", "add", f"{address}/24", "dev", name)
        self.do(host, "ip", "link", "set", name, "up")

    # Use ------------------------------------------------------------------------------------------

    def on(self, host: int, *command: str) -> list[str]:
        """A command line that runs a command on a host, in the caller's working directory."""
        # `sh` changes to the directory again, since entering the mount namespace leaves it.
        enter = ["nsenter", "-t", str(self._pids[host]), "--net", "--uts", "--mount", "--pid", "--"]
        return [
            "sh",
            "-c",
            'exec "$@"',
            "sh",
            *enter,
            "sh",
            "-c",
            'cd "$0" && exec "$@"',
            os.getcwd(),
            *command,
        ]

    def do(self, host: int, *command: str) -> None:
        """Runs a short command on a host."""
        subprocess.run(self.on(host, *command), check=True, capture_output=True)

    def names(self, host: int, lines: Sequence[str]) -> None:
        """Rewrites a host's /etc/hosts; the first line that has a name counts."""
        self._file(host, "hosts").write_text(
            "127.0.0.1 localhost\n" + "".join(f"{line}\n" for line in lines)
        )

    # Faults ---------------------------------------------------------------------------------------

    def kill(self, host: int) -> None:
        """Kills the host with all its processes."""
        os.kill(self._pids[host], signal.SIGKILL)

    def cut(self, host: int) -> None:
        """Takes the host's link down silently."""
        self._in_switch("ip", "link", "set", f"eth0-{host}", "down")

    def heal(self, host: int) -> None:
        self._in_switch("ip", "link", "set", f"eth0-{host}", "up")

    def slow(self, host: int, rate: str) -> None:
        """Limits the rate of traffic to a host, for instance to 10mbit."""
        limit = ("tbf", "rate", rate, "burst", "64kb", "latency", "100ms")
        self._in_switch("tc", "qdisc", "replace", "dev", f"eth0-{host}", "root", *limit)

    def drop(self, host: int, port: int) -> None:
        """Silently drops traffic to this port of the host, as firewalls do."""
        self._rules(host, f"dport {port} blackhole")

    def drop_all_but(self, host: int, port: int) -> None:
        """Drops all traffic to the host but that of connections to this port, and answers from this
        port."""
        self._rules(host, f"dport {port} lookup local", f"sport {port} lookup local", "blackhole")

    def open_again(self, host: int) -> None:
        """Drops nothing any more: restores the kernel's default routing rules."""
        self.do(host, "ip", "rule", "flush")
        for pref, table in (("0", "local"), ("32766", "main"), ("32767", "default")):
            self.do(host, "ip", "rule", "add", "pref", pref, "lookup", table)

    def _rules(self, host: int, *rules: str) -> None:
        """Installs routing rules ahead of the kernel's rule for the host's own addresses."""
        self.do(host, "ip", "rule", "add", "pref", "100", "lookup", "local")
        self.do(host, "ip", "rule", "delete", "pref", "0")
        for i, rule in enumerate(rules):
            self.do(
                host,
                "ip",
                "rule",
                "add",
                "pref",
                str(10 + i),
                "iif",
                "eth0",
                "ipproto",
                "tcp",
                *rule.split(),
            )
