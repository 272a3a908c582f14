"""The doctor's report, as text and as JSON."""

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from meshtrain.doctor.findings import Finding, status
from meshtrain.doctor.nccl import interface_of
from meshtrain.doctor.records import ClusterFacts, Timing
from meshtrain.errors import plural, printable, ranges

MARKS = {"error": "ERROR", "warning": "warning", "note": "note"}
WIDTH = 140  # of output that does not go to a terminal
MOST_HOSTS = 32  # in the table; `--json` has all
MOST_DIGESTS = 4  # of one kind that are shown


def print_report(cluster: ClusterFacts, findings: Sequence[Finding], as_json: bool) -> None:
    if as_json:
        print(json.dumps(report_json(cluster, findings)), flush=True)
        return
    from rich.console import Console

    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else WIDTH)
    if cluster.attempt is None:
        console.print(_hosts_table(cluster))
        console.print(digests_text(cluster) + "\n")
    if cluster.timings is not None and cluster.timings.timings:
        console.print(_timings_table(cluster.timings.timings, cluster.timings.backend))
    print(findings_text(findings), flush=True)


def print_summary(findings: Sequence[Finding], host: str, leader: str, quiet: bool) -> None:
    """Prints what concerns this host, as another host prints it all; nothing if `quiet` and all is
    well here."""
    own = [finding for finding in findings if host in finding.where]
    wrong = status(own)
    if quiet and not wrong:
        return
    if not wrong:
        print(
            f"{host}: nothing is wrong with this "
            f"host{', but the job has errors' if status(findings) else ''}"
        )
    print("\n".join([*map(block, own), f"(the whole report is on {leader})"]), flush=True)


def findings_text(findings: Sequence[Finding]) -> str:
    counts = [
        sum(finding.severity == kind for finding in findings) for kind in ("error", "warning")
    ]
    errors, warnings = map(plural, counts, ("error", "warning"))
    summary = (
        f"{errors}, {warnings}"
        if counts[0]
        else "all is well" + f", with {warnings}" * bool(counts[1])
    )
    return "\n".join([*map(block, findings), summary])


def block(finding: Finding) -> str:
    message = printable(finding.what).replace("\n", "\n  ")
    fix = f"\n  fix: {printable(finding.fix)}" if finding.fix else ""
    return f"{MARKS[finding.severity]} {finding.id}: {message}{fix}"


def digests(cluster: ClusterFacts) -> dict[str, dict[str, list[str]]]:
    """What should be the same on all hosts -> its digest -> the hosts that have it."""
    kinds: dict[str, dict[str, list[str]]] = {}
    for name, host in cluster.labelled:
        values = {
            "code": host.code,
            "versions": host.versions,
            "config": host.config,
            "environment": host.variables,
        }
        for kind, value in values.items():
            digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]
            kinds.setdefault(kind, {}).setdefault(digest, []).append(name)
    return kinds


def digests_text(cluster: ClusterFacts) -> str:
    """`digests: code 3f2a90c1, versions ...` for comparing jobs; differences between hosts are
    among the findings."""
    kinds = digests(cluster).items()
    return "digests: " + ", ".join(
        f"{kind} {'/'.join(row)}" for kind, row in kinds if len(row) <= MOST_DIGESTS
    )


def report_json(cluster: ClusterFacts, findings: Sequence[Finding]) -> dict[str, Any]:
    rows = [asdict(finding) for finding in findings]
    return {
        "status": status(findings),
        "findings": rows,
        "digests": digests(cluster),
        "seen": asdict(cluster),
    }


def _table(title: str, columns: Sequence[str], left_aligned: Sequence[str]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for name in columns:
        # a narrow terminal folds lines, but no word of these is cut
        widest = max(map(len, name.split() or [""]))
        justify: Any = "left" if name in left_aligned else "right"
        table.add_column(name, justify=justify, min_width=widest, overflow="fold")
    return table


def _hosts_table(cluster: ClusterFacts) -> Any:
    columns = (
        "node",
        "host",
        "processes",
        "ranks",
        "GPUs",
        "by",
        "clock",
        "memory free",
        "disk free",
    )
    left_aligned = [name for name in columns if name not in ("node", "processes")]
    table = _table(
        f"{len(cluster.hosts)} of {cluster.hosts[0].place.nodes} nodes", columns, left_aligned
    )
    for i, (name, host) in enumerate(cluster.labelled[:MOST_HOSTS]):
        interface = interface_of(host.interfaces, host.route)
        clock = cluster.clocks[i] if 0 < i < len(cluster.clocks) else None
        disk = next((path.free_gib for path in host.paths if path.free_gib is not None), None)
        ranks = ", ".join(ranges(host.ranks))
        gpus = (
            f"{host.gpus_seen} {host.gpus[0].name}"
            if host.gpus and host.gpus_seen
            else str(host.gpus_seen)
        )
        route = f"{interface.name} {host.route}" if interface is not None else host.route
        memory = f"{host.memory_free_gib:.0f} of {host.memory_gib:.0f} GiB"
        clock_text, disk_text = (
            f"{clock[0]:+.3f} s" if clock else "",
            "" if disk is None else f"{disk:.0f} GiB",
        )
        cells = (
            str(i),
            name,
            str(host.processes),
            ranks,
            gpus,
            route,
            clock_text,
            memory,
            disk_text,
        )
        table.add_row(*map(printable, cells))
    if len(cluster.hosts) > MOST_HOSTS:
        table.add_row("...", f"{len(cluster.hosts) - MOST_HOSTS} more")
    return table


def _timings_table(timings: Sequence[Timing], backend: str) -> Any:
    columns = ("axis", "ranks", "", "collective", "latency", "size", "time", "bandwidth", "spread")
    title = f"collectives over {backend}, the slowest group of each"
    table = _table(title, columns, ("axis", "", "collective"))
    for row in timings:
        group = (row.axes, str(row.ranks), "between hosts" if row.crosses else "inside", row.what)
        times = (
            f"{1e6 * row.latency:.0f} us",
            f"{row.size / 2**20:.2f} MiB",
            f"{1e3 * row.seconds:.2f} ms",
        )
        table.add_row(*group, *times, f"{row.bandwidth / 1e9:.3f} GB/s", f"{row.spread:.1f} x")
    return table
