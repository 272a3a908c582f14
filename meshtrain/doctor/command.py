"""The doctor, from facts to report. It runs in place of torchrun, which starts no worker while a
node is missing.

meshtrain doctor --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=node1:29500 CONFIG     (on every
node) srun meshtrain doctor CONFIG torchrun ... -m meshtrain.doctor CONFIG meshtrain doctor --local
CONFIG
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

from meshtrain.doctor import records
from meshtrain.doctor.bandwidth import Spec, merge, run_workers
from meshtrain.doctor.facts import collect, look_up
from meshtrain.doctor.files import tidy, visible
from meshtrain.doctor.findings import Finding, status
from meshtrain.doctor.nccl import addresses_of, communicates_by
from meshtrain.doctor.ports import PortProbe, check_ports, clock_offset, peers_to_check
from meshtrain.doctor.records import (
    ClusterFacts,
    Host,
    PeerChecks,
    PeerEntry,
    RecordError,
    from_json,
    to_json,
)
from meshtrain.doctor.rendezvous import (
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


@dataclass(frozen=True)
class DoctorRun:
    place: records.Place
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
    """Returns the exit status: 0 if all is well, 1 if something is wrong."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that it cleans up
    words = [word for word in (arguments.config, *arguments.overrides) if word is not None]
    # torchrun's `-m meshtrain.train` in front of the config
    words = words[1:] if arguments.module else words
    config, overrides = (
        (None, words) if words and "=" in words[0] else (words[0] if words else None, words[1:])
    )
    if config is None and overrides:
        raise InputError(
            f"overrides {' '.join(overrides)} without a config: name the YAML file first"
        )
    place = read_place(arguments, os.environ)
    if not speaks_for_node(os.environ, place):
        return 0
    outcome = examine(DoctorRun(place, os.environ, config, tuple(overrides), arguments.wait))
    if outcome.cluster is not None:
        print_report(outcome.cluster, outcome.findings, arguments.json)
    elif not arguments.json:
        print_summary(
            outcome.findings, socket.gethostname(), outcome.leader, quiet=bool(place.ranks)
        )
    if status(outcome.findings):
        errors = [found.what for found in outcome.findings if found.severity == "error"]
        more = f" (and {len(errors) - 1} more, printed above)" if len(errors) > 1 else ""
        tell_launcher(f"meshtrain doctor: {errors[0]}{more}")
    return status(outcome.findings)


def examine(run: DoctorRun) -> Outcome:
    host = collect(run.place, run.config, run.overrides, run.variables)
    probe = PortProbe(f"{host.host} {host.machine}", run.clock)
    try:
        return _examine_alone(host) if run.place.launcher == "local" else _meet(run, host, probe)
    except (JoinError, RecordError) as error:
        other = records.JoinFailure(
            "stranger", f"a doctor of another version of meshtrain ({error})"
        )
        cluster = ClusterFacts((host,), error.failure if isinstance(error, JoinError) else other)
        return Outcome(judge(cluster), cluster)
    finally:
        probe.close()
        tidy(host.paths)


def _meet(run: DoctorRun, host: Host, probe: PortProbe) -> Outcome:
    place, addresses = run.place, host.addresses
    host = replace(host, port=probe.port)
    if not serves(place, host.host, addresses):
        return _follow(join_rendezvous(host, run.wait_s), run, host, probe)
    told_elsewhere = place.serves and not serves(replace(place, serves=None), host.host, addresses)
    member = None
    with suppress(JoinError):
        # is_host=1 for another's address: its owner may serve, too
        if told_elsewhere and place.backend == "c10d":
            member = join_rendezvous(host, min(run.wait_s / 2, OTHER_SERVER_S))
    try:
        leader = None if member else open_rendezvous(host)
    except JoinError as taken:
        if place.backend == "static" or place.serves is not None:
            raise
        # two agents on one host: as under torchrun, the second one at the port joins the first
        try:
            leader, member = None, join_rendezvous(host, min(run.wait_s, 2.0))
        except JoinError:
            raise taken from None
    if leader is None:
        assert member is not None
        return _follow(member, run, host, probe)
    try:
        return _lead(leader, run, probe)
    finally:
        leader.close()


def _examine_alone(host: Host) -> Outcome:
    host = replace(
        host,
        ranks=tuple(range(host.processes)),
        route=next(iter(addresses_of(host.interfaces)), ""),
    )
    cluster = _time_collectives(ClusterFacts((host,), visits=(PeerChecks(),), clocks=((0.0, 0.0),)))
    return Outcome(judge(cluster), cluster)


def _lead(leader: Leader, run: DoctorRun, probe: PortProbe) -> Outcome:
    cluster = leader.wait(run.wait_s)
    host, *others = cluster.hosts
    routes = [plain_address(address_towards(other.route)) for other in others]
    host = replace(
        host, route=next(filter(None, routes), next(iter(addresses_of(host.interfaces)), ""))
    )
    cluster = replace(cluster, hosts=(host, *others))
    entries = tuple(
        _entry(number, host) for number, host in zip(leader.numbers, cluster.hosts, strict=True)
    )
    leader.board.set("directory", [to_json(entry) for entry in entries])
    own = replace(_check_peers(0, entries, host, run), clock=(0.0, 0.0))
    checks = leader.gather("checks", PeerChecks, own, CHECKS_S)
    probe.close()
    clocks = tuple(None if check is None else check.clock for check in checks)
    silent = tuple(
        host.host for host, check in zip(cluster.hosts, checks, strict=True) if check is None
    )
    cluster = _time_collectives(
        replace(cluster, visits=tuple(checks), clocks=clocks, silent=silent), leader
    )
    findings = judge(cluster)
    leader.board.set("findings", [to_json(finding) for finding in findings])
    leader.close(SLACK_S)
    return Outcome(findings, cluster, cluster.hosts[0].host)


def _entry(number: int, host: Host) -> PeerEntry:
    """The addresses to try are that of the route, and those that NCCL or gloo would announce to the
    others."""
    chosen = [address for address in addresses_of(communicates_by(host)[2]) if ":" not in address]
    addresses = tuple(filter(None, dict.fromkeys([host.route, *chosen[:4]])))
    tokens = tuple(path.token for path in host.paths if path.token)
    return PeerEntry(
        number, host.host, host.ranks, f"{host.host} {host.machine}", host.port, addresses, tokens
    )


def _check_peers(node: int, entries: Sequence[PeerEntry], host: Host, run: DoctorRun) -> PeerChecks:
    peers = [(other, entries[other]) for other in peers_to_check(node, len(entries))]
    targets = [
        (other, address, entry.port, entry.probe)
        for other, entry in peers
        for address in entry.addresses
    ]
    names, _ = look_up({entry.host for _, entry in peers})
    tokens = [token for i, entry in enumerate(entries) if i != node for token in entry.tokens]
    present, blind = visible(host.paths, tokens)
    leader = entries[0]
    clock = (
        clock_offset(leader.addresses[0], leader.port, run.clock)
        if node and leader.addresses
        else None
    )
    return PeerChecks(check_ports(node, targets), names, present, blind, clock)


def _time_collectives(cluster: ClusterFacts, leader: Leader | None = None) -> ClusterFacts:
    """Has the workers of all nodes time the collectives of the layout, unless that is certain to
    fail."""
    spec, reason = _spec(cluster)
    if leader is not None:
        leader.board.set("spec", None if spec is None else to_json(spec))
    if spec is None:
        return replace(cluster, timings=records.Timings(skipped=reason))
    # All nodes' workers end together, or are given up at about the same time, so the wait for
    # answers is short.
    results = run_workers(spec, cluster.hosts[0].ranks, "127.0.0.1", True)
    answers = (
        [{}]
        if leader is None
        else leader.gather("timings", dict[str, dict[str, object]], {}, 2 * SLACK_S)
    )
    for rank, result in (row for answer in answers for row in (answer or {}).items()):
        if rank.isdecimal() and len(rank) < 10:
            results[int(rank)] = result
    silent = [
        host.host for host, answer in zip(cluster.hosts, answers, strict=True) if answer is None
    ]
    return replace(cluster, timings=merge(spec.layout, results), silent=(*cluster.silent, *silent))


def _spec(cluster: ClusterFacts) -> tuple[Spec | None, str]:
    by_rank = {rank: i for i, host in enumerate(cluster.hosts) for rank in host.ranks}
    if first := blocking(judge(cluster)):
        return None, f"first mend {', '.join(dict.fromkeys(finding.id for finding in first))}"
    if len(by_rank) < 2:
        return None, "the job has one process"
    if any(0 < host.gpus_seen < host.processes for host in cluster.hosts):  # srun --gpus-per-task
        return (
            None,
            "a task sees only some of its node's GPUs: run one task per node (srun "
            "--ntasks-per-node=1)",
        )
    if sorted(by_rank) != list(range(len(by_rank))):
        return None, "not every process of the job has come"
    sizes = next(
        (host.layout for host in cluster.hosts if host.layout is not None), {"dp_shard": -1}
    )
    with listen(0) as listener:
        port = listener.getsockname()[1]
    names = tuple(
        f"{by_rank[rank]} {cluster.hosts[by_rank[rank]].host}" for rank in sorted(by_rank)
    )
    return Spec(Layout.resolve(sizes, len(by_rank)).sizes, names, port, WORKERS_S), ""


def _follow(member: Member, run: DoctorRun, host: Host, probe: PortProbe) -> Outcome:
    entries = from_json(
        tuple[PeerEntry, ...], member.hear("directory", run.wait_s + SLACK_S), "directory"
    )
    node = next((i for i, entry in enumerate(entries) if entry.number == member.number), 0)
    if not node:
        raise JoinError("left", "it began without this node")
    ranks = entries[node].ranks
    member.give("checks", to_json(_check_peers(node, entries, host, run)))
    spec = member.hear("spec", CHECKS_S + SLACK_S)
    probe.close()
    if spec is not None:
        results = run_workers(from_json(Spec, spec), ranks, member.leader_address, False)
        member.give("timings", {str(rank): result for rank, result in results.items()})
    seconds = 4 * SLACK_S if spec is not None else SLACK_S
    findings = from_json(tuple[Finding, ...], member.hear("findings", seconds), "findings")
    member.give("done", True)
    return Outcome(list(findings), None, entries[0].host)
