"""What people and programs read of it."""

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from meshtrain.operate.doctor.finding import Finding, labels
from meshtrain.operate.doctor.findings import status
from meshtrain.operate.doctor.interfaces import interface_of
from meshtrain.operate.doctor.record import Host, Seen, Timing

MARKS = {"error": "ERROR", "warning": "warning", "note": "note"}
WIDTH = 140  # of what is not written to a terminal
MOST_HOSTS = 32  # of the table; `--json` has all
MOST_DIGESTS = 4  # of one kind that are shown


def print_report(seen: Seen, found: Sequence[Finding], as_json: bool) -> None:
    """Everything, as the node tells it that knows everything."""
    if as_json:
        print(json.dumps(report_json(seen, found)), flush=True)
        return
    from rich.console import Console

    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else WIDTH)
    if seen.attempt is None:
        console.print(_hosts_table(seen))
        console.print(digests_text(seen) + "\n")
    if seen.timings is not None and seen.timings.timings:
        console.print(_timings_table(seen.timings.timings, seen.timings.backend))
    print(findings_text(found), flush=True)


def print_summary(found: Sequence[Finding], host: str, leader: str, quiet: bool) -> None:
    """What concerns this host, where another one tells everything; nothing at all if `quiet` and all is well here."""
    mine = [one for one in found if host in one.where]
    wrong = any(one.severity == "error" for one in mine)
    if quiet and not wrong:
        return
    if not wrong:
        print(f"{host}: nothing is wrong with this host{', but the job has errors' if status(list(found)) else ''}")
    print("\n".join([*map(block, mine), f"(the whole report is on {leader})"]), flush=True)


def findings_text(found: Sequence[Finding]) -> str:
    """One block per finding: what, where it is clear from that, and the fix."""
    blocks = [block(one) for one in found]
    counts = {kind: sum(one.severity == kind for one in found) for kind in MARKS}
    if status(list(found)):
        verdict = f"{_count(counts['error'], 'error')}, {_count(counts['warning'], 'warning')}"
    else:
        verdict = "all is well" + (f", with {_count(counts['warning'], 'warning')}" if counts["warning"] else "")
    return "\n".join([*blocks, verdict])


def block(one: Finding) -> str:
    what = _plain(one.what).replace("\n", "\n  ")
    fix = f"\n  fix: {_plain(one.fix)}" if one.fix else ""
    return f"{MARKS[one.severity]} {one.id}: {what}{fix}"


def _plain(text: str) -> str:
    """Without the characters by which a text from elsewhere could steer a terminal."""
    return "".join(char for char in text if char.isprintable() or char == "\n")


def digests(seen: Seen) -> dict[str, dict[str, list[str]]]:
    """What should be alike on all hosts -> its digest -> the hosts that have it."""
    found: dict[str, dict[str, list[str]]] = {}
    for name, host in zip(labels(seen), seen.hosts, strict=True):
        kinds = {"code": host.code, "versions": host.versions, "config": host.config, "environment": host.variables}
        for kind, value in kinds.items():
            digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]
            found.setdefault(kind, {}).setdefault(digest, []).append(name)
    return found


def digests_text(seen: Seen) -> str:
    """`code 3f2a90c1, versions ...` for people who compare jobs; what differs stands among the findings."""
    told = [f"{kind} {'/'.join(values)}" for kind, values in digests(seen).items() if len(values) <= MOST_DIGESTS]
    return "digests: " + ", ".join(told)


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"


def report_json(seen: Seen, found: Sequence[Finding]) -> dict[str, Any]:
    """Everything for a program: `status`, `findings`, and what they were found from."""
    return {
        "status": status(list(found)),
        "findings": [asdict(one) for one in found],
        "digests": digests(seen),
        "seen": asdict(seen),
    }


def _hosts_table(seen: Seen) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(
        box=box.SIMPLE_HEAD, title=f"{len(seen.hosts)} of {seen.hosts[0].place.nodes} nodes", title_justify="left"
    )
    for name in ("node", "host", "processes", "ranks", "GPUs", "by", "clock", "memory free", "disk free"):
        table.add_column(name, justify="right" if name in ("node", "processes") else "left")
    names = labels(seen)
    for i, host in enumerate(seen.hosts[:MOST_HOSTS]):
        table.add_row(str(i), _plain(names[i]), *map(_plain, _cells(seen, i, host)))
    if len(seen.hosts) > MOST_HOSTS:
        table.add_row("...", f"{len(seen.hosts) - MOST_HOSTS} more")
    return table


def _cells(seen: Seen, i: int, host: Host) -> list[str]:
    found = interface_of(host.interfaces, host.route)
    clock = seen.clocks[i] if i < len(seen.clocks) else None
    disk = next((one.free_gib for one in host.paths if one.free_gib is not None), None)
    ranks = f"{host.ranks[0]}-{host.ranks[-1]}" if len(host.ranks) > 1 else "".join(map(str, host.ranks))
    return [
        str(host.processes),
        ranks,
        f"{host.gpus_seen} {host.gpus[0].name}" if host.gpus and host.gpus_seen else str(host.gpus_seen),
        f"{found.name} {host.route}" if found is not None else host.route,
        "" if clock is None or i == 0 else f"{clock[0]:+.3f} s",
        f"{host.memory_free_gib:.0f} of {host.memory_gib:.0f} GiB",
        "" if disk is None else f"{disk:.0f} GiB",
    ]


def _timings_table(timings: Sequence[Timing], backend: str) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(
        box=box.SIMPLE_HEAD, title=f"collectives over {backend}, the slowest group of each", title_justify="left"
    )
    for name in ("axis", "ranks", "", "collective", "latency", "size", "time", "bandwidth", "spread"):
        table.add_column(name, justify="left" if name in ("axis", "", "collective") else "right")
    for one in timings:
        table.add_row(
            one.axes,
            str(one.ranks),
            "between hosts" if one.crosses else "inside",
            one.what,
            f"{1e6 * one.latency:.0f} us",
            f"{one.size / 2**20:.2f} MiB",
            f"{1e3 * one.seconds:.2f} ms",
            f"{one.bandwidth / 1e9:.3f} GB/s",
            f"{one.spread:.1f} x",
        )
    return table
