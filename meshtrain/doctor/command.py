"""The doctor, from facts to report. It runs in place of torchrun, which starts no worker while a
node is missing.

    meshtrain doctor --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=node1:29500 CONFIG
    srun meshtrain doctor CONFIG
    torchrun ... -m meshtrain.doctor CONFIG
    meshtrain doctor --local CONFIG
"""

import argparse
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from meshtrain.doctor.bandwidth import Spec, merge, run_workers
from meshtrain.doctor.facts import collect, look_up
from meshtrain.doctor.files import tidy, visible
from meshtrain.doctor.findings import Finding, status
from meshtrain.doctor.nccl import addresses_of, communicates_by
from meshtrain.doctor.ports import PortProbe, check_ports, clock_offset, peers_to_check
from meshtrain.doctor.records import (
    ClusterFacts,
    Host,
    JoinFailure,
    PeerChecks,
    PeerEntry,
    Place,
    RecordError,
    Timings,
    from_json,
    to_json,
)
from meshtrain.doctor.rendezvous import (
    OTHER_VERSION,
    JoinError,
    Leader,
    Member,
    join_rendezvous,
    open_rendezvous,
    serves,
)
from meshtrain.doctor.report import print_report, print_summary
from meshtrain.doctor.rules import blocking, judge
from meshtrain.doctor.torchrun_options import add_torchrun_options, read_place, speaks_for_node
from meshtrain.errors import InputError
from meshtrain.job.environment import tell_launcher
from meshtrain.job.sockets import address_towards, listen, plain_address
from meshtrain.layout import Layout

WAIT_S = 30.0
CHECKS_S = 20.0  # to try ports, resolve names and look for files
WORKERS_S = 20.0
SLACK_S = 5.0  # beyond the limits above, for the leader to announce the results
# for a node that was told to serve another host's address to look who serves it
OTHER_SERVER_S = 5.0
MOST_ADDRESSES = 4  # of a host that the others try, beside that of its route


@dataclass(frozen=True)
class DoctorRun:
    place: Place
    variables: Mapping[str, str]
    config: str | None
    overrides: tuple[str, ...]
    wait_s: float = WAIT_S
    clock: Callable[[], float] = time.time


@dataclass(frozen=True)
class Outcome:
    findings: list[Finding]
    cluster: ClusterFacts | None = None  # None on a node that met the others and is not the leader
    leader: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", nargs="?", help="the run's YAML file, to check its paths and layout, too"
    )
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="override a key")
    parser.add_argument("--local", action="store_true", help="check this host alone, without a job")
    parser.add_argument(
        "--wait", type=float, default=WAIT_S, metavar="SECONDS", help="how long to wait for others"
    )
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")
    add_torchrun_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Returns the exit status: 0 if all is well, 1 if something is wrong. Raises InputError: this
    host has no Linux, or the arguments are wrong."""
    if sys.platform != "linux":
        raise InputError(
            f"meshtrain doctor reads what Linux says of a host, and this one has {sys.platform}: "
            "start it on the nodes of the job"
        )
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that it cleans up
    config, overrides = _config_and_overrides(arguments)
    place = read_place(arguments, os.environ)
    if not speaks_for_node(os.environ, place):
        return 0
    outcome = examine(DoctorRun(place, os.environ, config, tuple(overrides), arguments.wait))
    findings = outcome.findings
    if outcome.cluster is not None:
        print_report(outcome.cluster, findings, arguments.json)
    elif not arguments.json:
        host = socket.gethostname()
        print_summary(findings, host, outcome.leader, quiet=bool(place.ranks))

    if status(findings):
        errors = [found.what for found in findings if found.severity == "error"]
        text = f"meshtrain doctor: {errors[0]}"
        if len(errors) > 1:
            text += f" (and {len(errors) - 1} more, printed above)"
        tell_launcher(text)
    return status(findings)


def _config_and_overrides(arguments: argparse.Namespace) -> tuple[str | None, list[str]]:
    words = [word for word in (arguments.config, *arguments.overrides) if word is not None]
    if arguments.module:  # torchrun's `-m meshtrain.train` in front of the config
        words = words[1:]
    if not words:
        return None, []
    if "=" in words[0]:
        raise InputError(f"overrides {' '.join(words)} without a config: name the YAML file first")
    return words[0], words[1:]


def examine(run: DoctorRun) -> Outcome:
    host = collect(run.place, run.config, run.overrides, run.variables)
    probe = PortProbe(f"{host.host} {host.machine}", run.clock)
    try:
        if run.place.launcher == "local":
            return _examine_alone(host)
        return _meet(run, replace(host, port=probe.port), probe)
    except JoinError as error:
        return _failed(host, error.failure)
    except RecordError as error:
        return _failed(host, JoinFailure("stranger", f"{OTHER_VERSION} ({error})"))
    finally:
        probe.close()
        tidy(host.paths)


def _failed(host: Host, failure: JoinFailure) -> Outcome:
    cluster = ClusterFacts((host,), attempt=failure)
    return Outcome(judge(cluster), cluster)


def _examine_alone(host: Host) -> Outcome:
    host = replace(host, ranks=tuple(range(host.processes)), route=_any_address(host))
    cluster = ClusterFacts((host,), visits=(PeerChecks(),), clocks=((0.0, 0.0),))
    cluster = _time_collectives(cluster)
    return Outcome(judge(cluster), cluster)


def _any_address(host: Host) -> str:
    return next(iter(addresses_of(host.interfaces)), "")


def _meet(run: DoctorRun, host: Host, probe: PortProbe) -> Outcome:
    leader, member = _lead_or_join(run, host)
    if member is not None:
        return _follow(member, run, host, probe)
    assert leader is not None
    try:
        return _lead(leader, run, probe)
    finally:
        leader.close()


def _lead_or_join(run: DoctorRun, host: Host) -> tuple[Leader | None, Member | None]:
    """One of them: this node serves the endpoint, or has joined the one that does. Raises
    JoinError."""
    place = run.place
    if not serves(place, host.host, host.addresses):
        return None, join_rendezvous(host, run.wait_s)

    # is_host=1 for another's address: its owner may serve, too.
    untold = replace(place, serves=None)
    if place.serves and place.backend == "c10d" and not serves(untold, host.host, host.addresses):
        with suppress(JoinError):
            return None, join_rendezvous(host, min(run.wait_s / 2, OTHER_SERVER_S))
    try:
        return open_rendezvous(host), None
    except JoinError as taken:
        if place.backend == "static" or place.serves is not None:
            raise
        # Two agents on one host: as under torchrun, the second one at the port joins the first.
        try:
            return None, join_rendezvous(host, min(run.wait_s, 2.0))
        except JoinError:
            raise taken from None


# The node that serves the endpoint ----------------------------------------------------------------


def _lead(leader: Leader, run: DoctorRun, probe: PortProbe) -> Outcome:
    # Who is there.
    cluster = leader.wait(run.wait_s)
    host, *others = cluster.hosts
    host = replace(host, route=_route_towards(others) or _any_address(host))
    cluster = replace(cluster, hosts=(host, *others))
    entries = []
    for number, member in zip(leader.numbers, cluster.hosts, strict=True):
        entries.append(_entry(number, member))
    leader.board.set("directory", [to_json(entry) for entry in entries])

    # Every node tries to reach the others.
    own = replace(_check_peers(0, entries, host, run), clock=(0.0, 0.0))
    checks = leader.gather("checks", PeerChecks, own, CHECKS_S)
    probe.close()
    cluster = replace(
        cluster,
        visits=tuple(checks),
        clocks=tuple(None if check is None else check.clock for check in checks),
        silent=_silent(cluster, checks),
    )

    cluster = _time_collectives(cluster, leader)
    findings = judge(cluster)
    leader.board.set("findings", [to_json(finding) for finding in findings])
    leader.close(SLACK_S)
    return Outcome(findings, cluster, cluster.hosts[0].host)


def _route_towards(others: Sequence[Host]) -> str:
    """This node's own address on the way to the first of the others that is reached at all."""
    for other in others:
        address = plain_address(address_towards(other.route))
        if address:
            return address
    return ""


def _silent(cluster: ClusterFacts, answers: Sequence[object]) -> tuple[str, ...]:
    """The hosts that have not answered."""
    rows = zip(cluster.hosts, answers, strict=True)
    return tuple(host.host for host, answer in rows if answer is None)


def _entry(number: int, host: Host) -> PeerEntry:
    """The addresses to try are that of the route, and those that NCCL or gloo would announce to the
    others."""
    announced = addresses_of(communicates_by(host).interfaces)
    ipv4 = [address for address in announced if ":" not in address]
    addresses = dict.fromkeys([host.route, *ipv4[:MOST_ADDRESSES]])
    return PeerEntry(
        number=number,
        host=host.host,
        ranks=host.ranks,
        probe=f"{host.host} {host.machine}",
        port=host.port,
        addresses=tuple(filter(None, addresses)),
        tokens=tuple(path.token for path in host.paths if path.token),
    )


# Every node ---------------------------------------------------------------------------------------


def _check_peers(node: int, entries: Sequence[PeerEntry], host: Host, run: DoctorRun) -> PeerChecks:
    targets = []
    names = set()
    for other in peers_to_check(node, len(entries)):
        entry = entries[other]
        names.add(entry.host)
        targets += [(other, address, entry.port, entry.probe) for address in entry.addresses]
    resolved, _ = look_up(names)

    tokens = [token for i, entry in enumerate(entries) if i != node for token in entry.tokens]
    present, blind = visible(host.paths, tokens)

    leader = entries[0]
    clock = None
    if node != 0 and leader.addresses:
        clock = clock_offset(leader.addresses[0], leader.port, run.clock)
    return PeerChecks(check_ports(node, targets), resolved, present, blind, clock)


def _time_collectives(cluster: ClusterFacts, leader: Leader | None = None) -> ClusterFacts:
    """Has the workers of all nodes time the collectives of the layout, unless that is certain to
    fail."""
    reason = _reason_not_to_time(cluster)
    spec = None if reason else _spec(cluster)
    if leader is not None:
        leader.board.set("spec", None if spec is None else to_json(spec))
    if spec is None:
        return replace(cluster, timings=Timings(skipped=reason))

    results = run_workers(spec, cluster.hosts[0].ranks, "127.0.0.1", serves=True)
    answers: Sequence[dict[str, dict[str, object]] | None] = [{}]
    if leader is not None:
        # All nodes' workers end together, or are given up at about the same time, so the wait for
        # answers is short.
        answers = leader.gather("timings", dict[str, dict[str, object]], {}, 2 * SLACK_S)
    for answer in answers:
        for rank, result in (answer or {}).items():
            if rank.isdecimal() and len(rank) < 10:
                results[int(rank)] = result
    silent = (*cluster.silent, *_silent(cluster, answers))
    return replace(cluster, timings=merge(spec.layout, results), silent=silent)


def _reason_not_to_time(cluster: ClusterFacts) -> str:
    first = blocking(judge(cluster))
    if first:
        return f"first mend {', '.join(dict.fromkeys(finding.id for finding in first))}"
    ranks = [rank for host in cluster.hosts for rank in host.ranks]
    if len(set(ranks)) < 2:
        return "the job has one process"
    if any(0 < host.gpus_seen < host.processes for host in cluster.hosts):  # srun --gpus-per-task
        return (
            "a task sees only some of its node's GPUs: run one task per node (srun "
            "--ntasks-per-node=1)"
        )
    if sorted(set(ranks)) != list(range(len(set(ranks)))):
        return "not every process of the job has come"
    return ""


def _spec(cluster: ClusterFacts) -> Spec:
    sizes = cluster.layout
    if sizes is None:
        sizes = {"dp_shard": -1}
    hosts = {}  # rank -> its host, with a number: several nodes may be one host
    for i, host in enumerate(cluster.hosts):
        for rank in host.ranks:
            hosts[rank] = f"{i} {host.host}"
    with listen(0) as listener:
        port = listener.getsockname()[1]
    return Spec(
        sizes=Layout.resolve(sizes, len(hosts)).sizes,
        hosts=tuple(hosts[rank] for rank in sorted(hosts)),
        port=port,
        seconds=WORKERS_S,
    )


# A node that has joined ---------------------------------------------------------------------------


def _follow(member: Member, run: DoctorRun, host: Host, probe: PortProbe) -> Outcome:
    directory = member.hear("directory", run.wait_s + SLACK_S)
    entries = from_json(tuple[PeerEntry, ...], directory, "directory")
    numbers = [entry.number for entry in entries]
    if member.number not in numbers[1:]:
        raise JoinError("left", "it began without this node")
    node = numbers.index(member.number)
    member.give("checks", to_json(_check_peers(node, entries, host, run)))

    task = member.hear("spec", CHECKS_S + SLACK_S)
    probe.close()
    wait_s = SLACK_S
    if task is not None:
        spec = from_json(Spec, task)
        results = run_workers(spec, entries[node].ranks, member.leader_address, serves=False)
        member.give("timings", {str(rank): result for rank, result in results.items()})
        wait_s = 4 * SLACK_S

    findings = from_json(tuple[Finding, ...], member.hear("findings", wait_s), "findings")
    member.give("done", True)
    return Outcome(list(findings), None, entries[0].host)
