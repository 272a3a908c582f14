"""The doctor on one page: meet, tell each other, try each other, judge, time, report.

meshtrain doctor --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=node1:29500 CONFIG     (on every node)
srun meshtrain doctor CONFIG
torchrun ... -m meshtrain.operate.doctor CONFIG
meshtrain doctor --local CONFIG
"""

import argparse
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from meshtrain.errors import InputError
from meshtrain.layout import Layout
from meshtrain.operate.doctor.beacon import Beacon
from meshtrain.operate.doctor.collectives import Spec, merge, run_workers
from meshtrain.operate.doctor.facts import collect, look_up
from meshtrain.operate.doctor.files import tidy, visible
from meshtrain.operate.doctor.finding import Finding
from meshtrain.operate.doctor.findings import blocking, judge, status
from meshtrain.operate.doctor.interfaces import addresses_of, communicates_by, is_loopback
from meshtrain.operate.doctor.meeting import (
    FailedError,
    Hello,
    Leader,
    Member,
    Roster,
    join_meeting,
    open_meeting,
    serves,
)
from meshtrain.operate.doctor.options import add_torchrun_options, read_place, speaks_for_node
from meshtrain.operate.doctor.ports import Door, try_ports, whom_to_try
from meshtrain.operate.doctor.record import (
    Attempt,
    Directory,
    Entry,
    Host,
    PathFacts,
    Place,
    RecordError,
    Seen,
    Timings,
    Visit,
    from_json,
    to_json,
)
from meshtrain.operate.doctor.report import print_report, print_summary
from meshtrain.operate.doctor.wire import listen

WAIT_S = 30.0
FACTS_S = 15.0  # for a host to say what it has collected: torch is imported, disks are read
VISITS_S = 20.0  # to try ports, look up names and look for files
WORKERS_S = 20.0
SLACK_S = 5.0  # more than the limits above, for the node that leads to tell what came of it


@dataclass(frozen=True)
class Examination:
    """What a node goes through with. `clock` is the host's."""

    place: Place
    variables: Mapping[str, str]
    config: str | None
    overrides: tuple[str, ...]
    wait_s: float = WAIT_S
    clock: Callable[[], float] = time.time


@dataclass(frozen=True)
class Told:
    """What the node that leads tells the others in the end."""

    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Verdict:
    """What came of it. `seen` is None on a node that met the others and does not lead."""

    findings: list[Finding]
    seen: Seen | None = None
    leader: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="?", help="the YAML file of the run; its paths and layout are checked too")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="as for training")
    parser.add_argument("--local", action="store_true", help="check this host alone, without a job")
    parser.add_argument("--wait", type=float, default=WAIT_S, metavar="SECONDS", help="for the other nodes to come")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")
    add_torchrun_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """The command. Returns 0 where all is well, 1 where something is wrong."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # and clean up on the way
    words = [word for word in (arguments.config, *arguments.overrides) if word is not None]
    words = words[1:] if arguments.module else words  # torchrun's `-m meshtrain.train` in front of the config
    config, overrides = (None, words) if words and "=" in words[0] else (words[0] if words else None, words[1:])
    if config is None and overrides:
        raise InputError(f"overrides {' '.join(overrides)} without a config: name the YAML file first")
    place = read_place(arguments, os.environ, socket.gethostname())
    if place.launcher == "torchrun":
        place = _through_store(place, arguments.wait)
    one = Examination(place, os.environ, config, tuple(overrides), arguments.wait)
    if not speaks_for_node(os.environ, place):
        return assist(one)
    verdict = examine(one)
    if verdict.seen is not None:
        print_report(verdict.seen, verdict.findings, arguments.json)
    elif not arguments.json:
        print_summary(verdict.findings, socket.gethostname(), verdict.leader, quiet=place.rank is not None)
    return status(verdict.findings)


def examine(one: Examination) -> Verdict:
    """Everything that this node does, from meeting the others to the verdict."""
    host = collect(one.place, one.config, one.overrides, one.variables)
    beacon = Beacon(host.host, one.place, host.interfaces)
    try:
        if one.place.launcher == "local":
            return _alone(host)
        with beacon:
            return _meet(one, host, beacon)
    except (FailedError, RecordError) as problem:
        other = Attempt("stranger", f"a doctor of another version of meshtrain ({problem})")
        attempt = problem.attempt if isinstance(problem, FailedError) else other
        seen = Seen((host,), attempt, heard=tuple(beacon.heard))
        return Verdict(judge(seen), seen)
    finally:
        tidy(host.paths)


def assist(one: Examination) -> int:
    """Another process of a node whose first one speaks for it: it waits for what it has to time."""
    hello = Hello("sibling", socket.gethostname(), one.place, 1)
    try:
        member = join_meeting(one.place, hello, one.wait_s + FACTS_S)
        spec = member.hear(one.wait_s + FACTS_S + VISITS_S + SLACK_S)
        if spec is not None and one.place.rank is not None:
            local = int(one.variables.get("LOCAL_RANK", one.variables.get("SLURM_LOCALID", "0")))
            found = run_workers(from_json(Spec, spec), [(one.place.rank, local)], member.leader_address, False)
            member.give({str(rank): result for rank, result in found.items()})
    except (FailedError, RecordError):
        return 1  # the first process of the node says why
    return 0


def _meet(one: Examination, host: Host, beacon: Beacon) -> Verdict:
    place = one.place
    hello = Hello("node", host.host, place, host.processes)
    if not serves(place, host.host, addresses_of(host.interfaces)):
        return _follow(join_meeting(place, hello, one.wait_s, one.clock), one, host)
    try:
        leader = open_meeting(place, hello, one.clock)
    except FailedError as failed:
        if place.backend == "static" or place.serves is not None:
            raise
        # Two agents on one host: as under torchrun, whoever comes second to the port goes to the first.
        try:
            member = join_meeting(place, hello, min(one.wait_s, 2.0), one.clock)
        except FailedError:
            raise failed from None
        return _follow(member, one, host)
    return _lead(leader, one, host, beacon)


def _alone(host: Host) -> Verdict:
    host = replace(host, ranks=tuple(range(host.processes)), route=next(iter(addresses_of(host.interfaces)), ""))
    seen = Seen((host,), visits=(Visit(),), clocks=((0.0, 0.0),))
    why = _why_not(seen)
    if why:
        timings = Timings(skipped=why)
    else:
        spec = _spec(seen)
        timings = merge(spec.layout, run_workers(spec, _places(host), "127.0.0.1", True))
    seen = replace(seen, timings=timings)
    return Verdict(judge(seen), seen)


def _places(host: Host) -> list[tuple[int, int]]:
    """Rank and local rank of the workers that the process which speaks for a node starts."""
    if host.place.rank is not None:
        return [(host.place.rank, host.ranks.index(host.place.rank))]
    return [(rank, i) for i, rank in enumerate(host.ranks)]


# The node that serves the endpoint ----------------------------------------------------------------------------------


def _lead(leader: Leader, one: Examination, host: Host, beacon: Beacon) -> Verdict:
    try:
        roster = leader.wait(one.wait_s)
        route = next(iter(leader.own_addresses), next(iter(addresses_of(host.interfaces)), ""))
        with_door, door = _open_door(replace(host, route=route, ranks=roster.ranks[0]))
        try:
            seen = _visits(leader, one, roster, _facts(leader, roster, with_door))
        finally:
            door.close()
        seen = replace(seen, heard=tuple(beacon.heard))
        seen = _timed(leader, seen)
        found = judge(seen)
        leader.tell(to_json(Told(tuple(found))))
        return Verdict(found, seen, host.host)
    finally:
        leader.close()


def _open_door(host: Host) -> tuple[Host, Door]:
    door = Door(_door_name(host))
    return replace(host, port=door.port), door


def _door_name(host: Host) -> str:
    return f"{host.host} {host.place.node_rank} {host.ranks}"


def _facts(leader: Leader, roster: Roster, own: Host) -> Seen:
    """What every node says of itself; for one that says nothing, what it said when it came."""
    hosts, silent = [], []
    for hello, ranks, found in zip(roster.nodes, roster.ranks, leader.gather(to_json(own), FACTS_S), strict=True):
        try:
            hosts.append(from_json(Host, found, hello.host))
        except RecordError:
            silent.append(hello.host)
            hosts.append(Host(hello.host, hello.place, hello.processes, ranks))
    return Seen(tuple(hosts), None, roster.strangers, roster.waited, tuple(leader.clocks()), silent=tuple(silent))


def _visits(leader: Leader, one: Examination, roster: Roster, seen: Seen) -> Seen:
    """Tells every node of the others, and hears how they reach each other."""
    directory = Directory(tuple(map(_entry, seen.hosts)))
    leader.tell(to_json(directory))
    own = _visit(0, directory, seen.hosts[0].paths)
    visits: list[Visit | None] = []
    silent = list(seen.silent)
    for hello, found in zip(roster.nodes, leader.gather(to_json(own), VISITS_S), strict=True):
        try:
            visits.append(from_json(Visit, found, hello.host))
        except RecordError:
            visits.append(None)
            silent += [] if hello.host in silent else [hello.host]
    return replace(seen, visits=tuple(visits), silent=tuple(silent))


def _entry(host: Host) -> Entry:
    """The addresses to try are that of the route, and those that NCCL or gloo would tell the others."""
    chosen = [address for address in addresses_of(communicates_by(host)[2]) if ":" not in address]
    addresses = list(dict.fromkeys([host.route, *chosen[:4]])) if host.port else []
    tokens = tuple(path.token for path in host.paths if path.token)
    return Entry(host.host, _door_name(host), host.port, tuple(filter(None, addresses)), tokens)


def _visit(node: int, directory: Directory, paths: Sequence[PathFacts]) -> Visit:
    """Tries the others' doors, names and files."""
    entries = directory.entries
    try_ = [(other, entries[other]) for other in whom_to_try(node, len(entries))]
    targets = [(other, address, entry.port, entry.door) for other, entry in try_ for address in entry.addresses]
    names, _ = look_up({entry.host for _, entry in try_})
    tokens = [token for i, entry in enumerate(entries) if i != node for token in entry.tokens]
    seen, blind = visible(paths, tokens)
    return Visit(try_ports(node, targets), names, seen, blind)


def _timed(leader: Leader, seen: Seen) -> Seen:
    """Has the workers of all nodes time the collectives of the layout, unless that is bound to fail."""
    why = _why_not(seen)
    spec = None if why else _spec(seen)
    for tell in (leader.tell, leader.tell_siblings):
        tell(None if spec is None else to_json(spec))
    if spec is None:
        return replace(seen, timings=Timings(skipped=why))
    host = seen.hosts[0]
    # All nodes' workers end together, or are given up at about the same time: then there is little to wait for.
    own = run_workers(spec, _places(host), "127.0.0.1", True)
    found: dict[int, Any] = dict(own)
    of_nodes = leader.gather({}, 2 * SLACK_S)
    for results in [*of_nodes, *leader.gather_siblings(SLACK_S)]:
        if isinstance(results, dict):
            found |= {int(rank): result for rank, result in results.items() if isinstance(result, dict)}
    silent = [host.host for host, results in zip(seen.hosts, of_nodes, strict=True) if results is None]
    return replace(seen, timings=merge(spec.layout, found), silent=(*seen.silent, *silent))


def _why_not(seen: Seen) -> str:
    first = blocking(judge(seen))
    if first:
        return f"first mend {', '.join(dict.fromkeys(one.id for one in first))}"
    ranks = sorted(rank for host in seen.hosts for rank in host.ranks)
    if len(ranks) < 2:
        return "the job has one process"
    # Under srun a task that did not come leaves a gap.
    return "" if ranks == list(range(len(ranks))) else "not every process of the job has come"


def _spec(seen: Seen) -> Spec:
    by_rank = {rank: i for i, host in enumerate(seen.hosts) for rank in host.ranks}
    sizes = next((host.layout for host in seen.hosts if host.layout is not None), {"dp_shard": -1})
    with listen(0) as probe:
        port = probe.getsockname()[1]
    names = tuple(f"{i} {seen.hosts[i].host}" for i in (by_rank[rank] for rank in sorted(by_rank)))
    return Spec(Layout.resolve(sizes, len(by_rank)).sizes, names, port, WORKERS_S)


# The others ---------------------------------------------------------------------------------------------------------


def _follow(member: Member, one: Examination, host: Host) -> Verdict:
    try:
        roster = member.roster(one.wait_s + SLACK_S)
        # On a host's own loopback there is no other interface to see: agents of one host meet there.
        route = member.own_address
        if is_loopback(route):
            route = member.leader_address
        with_door, door = _open_door(replace(host, route=route, ranks=roster.ranks[roster.you]))
        try:
            member.give(to_json(with_door))
            directory = from_json(Directory, member.hear(FACTS_S + SLACK_S))
            member.give(to_json(_visit(roster.you, directory, host.paths)))
            spec = member.hear(VISITS_S + SLACK_S)
        finally:
            door.close()
        if spec is not None:
            results = run_workers(from_json(Spec, spec), _places(with_door), member.leader_address, False)
            member.give({str(rank): result for rank, result in results.items()})
        told = from_json(Told, member.hear(4 * SLACK_S if spec is not None else SLACK_S))
        return Verdict(list(told.findings), None, roster.nodes[0].host)
    finally:
        member.close()


def _through_store(place: Place, wait_s: float) -> Place:
    """Under torchrun the endpoint's port has torch's store already: the doctors agree through it on another one."""
    import torch.distributed as dist  # here, because it takes two seconds

    use = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        place.address, place.port, is_master=not use and place.rank == 0, timeout=timedelta(seconds=wait_s),
        wait_for_workers=False,
    )  # fmt: skip
    key = f"doctor/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if place.rank == 0:
        with listen(0) as probe:
            store.set(key, str(probe.getsockname()[1]))
    return replace(place, port=int(store.get(key)))
