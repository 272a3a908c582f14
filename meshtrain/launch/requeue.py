"""Requeue: whether and without which nodes a failed SLURM job continues; called by the scripts of
tools/slurm.

    python -m meshtrain.launch.requeue RUN --job 4211 --nodes "gpu07 gpu08 gpu09" --needed 2 --tries
    3 [--down gpu08]

It prints three lines: `again` (on nodes that the job still has), `requeue` or `end`; the nodes to
leave out; the reason. The run's `requeue.json` counts failures without progress; its goodput ledger
tells how far the run has come.
"""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshtrain.job.parsing import parse_json
from meshtrain.job.storage import move_damaged, read_guarded, write_whole
from meshtrain.job.watchdog.records import OUT_OF_REACH, DiagnosisKind
from meshtrain.metrics.goodput import FILE, JobRecord, read

HISTORY = "requeue.json"
FINAL = (DiagnosisKind.TRAINING, DiagnosisKind.INPUT)  # it would fail in the same way again
HARDWARE = re.compile(
    r"\bECC\b|\bXid\b|uncorrectable|fallen off the bus|GPU is lost|hardware", re.IGNORECASE
)


@dataclass(frozen=True)
class History:
    """The failures of a run so far."""

    job: str = ""  # the SLURM job to which the count belongs; for another job it begins anew
    step: int = -1  # of the furthest checkpoint that a failure has left behind
    failures: int = 0  # in a row, since the last one that made progress, which counts, too

    def after_failure(self, job: str, step: int) -> "History":
        begins_anew = job != self.job or step > self.step
        failures = 1 if begins_anew else self.failures + 1
        return History(job, max(step, self.step), failures)


@dataclass(frozen=True)
class Decision:
    action: str  # "again", on nodes of the same job; "requeue"; "end"
    lost: tuple[str, ...]  # nodes to leave out
    reason: str


def decide(
    end: Mapping[str, Any] | None,
    history: History,
    nodes: Sequence[str],
    needed: int,
    tries: int,
    down: Sequence[str],
) -> Decision:
    """Decides what to do with a job that has failed; a pure function.

    Args:
        end: exit.json; None: the job has failed before it could write one.
        history: of the run, with this failure.
        nodes: those that the job still had; it needs `needed` of them.
        tries: how often in a row it is restarted without having made progress.
        down: nodes known to be unhealthy from elsewhere: SLURM, or a preflight.
    """
    end = {} if end is None else end
    reason = str(end.get("reason", "it could not start"))
    blamed = _blamed_hosts(end, reason)
    lost = tuple(node for node in nodes if node in down or _short(node) in blamed)

    # Without an exit.json it did not get as far as training: unless a node is at fault, it never
    # will.
    if end.get("kind") in FINAL or (not end and not lost):
        return Decision("end", (), f"{reason}: the same would happen again")
    if history.failures > tries:
        stays = f"{history.failures} failures in a row have got no further than step {history.step}"
        return Decision("end", lost, f"{reason}: {stays}")
    if lost:
        reason += f"; goes on without {', '.join(lost)}"
    enough = len(nodes) - len(lost) >= needed
    return Decision("again" if enough else "requeue", lost, reason)


def _blamed_hosts(end: Mapping[str, Any], reason: str) -> set[str]:
    """The hosts whose own fault a failure was, by their short names."""
    kind, hosts = end.get("kind"), end.get("hosts", [])
    broken = kind == DiagnosisKind.FAILED and HARDWARE.search(reason) is not None
    if not isinstance(hosts, list) or (kind not in OUT_OF_REACH and not broken):
        return set()
    return {_short(str(host)) for host in hosts}


def _short(host: str) -> str:
    return host.partition(".")[0]


def furthest_step(jobs: Sequence[JobRecord]) -> int:
    """The step from which the next start of a run with this ledger resumes, as far as known; a pure
    function."""
    if not jobs:
        return 0
    saved = [mark.step for mark in jobs[-1].marks if mark.saved]
    return max([jobs[-1].first, *saved])


def read_history(folder: Path) -> History:
    path = folder / HISTORY
    try:
        return History(**parse_json(read_guarded(path)))
    except FileNotFoundError:
        pass
    except (ValueError, TypeError) as error:
        move_damaged(path, error)
    return History()


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("folder", type=Path, help="the run's")
    parser.add_argument("--job", required=True, help="its number")
    parser.add_argument(
        "--nodes", type=str.split, required=True, help="that it had, with spaces between them"
    )
    parser.add_argument("--needed", type=int, required=True, help="so many of them")
    parser.add_argument("--tries", type=int, required=True)
    parser.add_argument(
        "--down", type=str.split, default=[], help="those that are known to be out of order"
    )
    parser.add_argument(
        "--no-exit", action="store_true", help="the exit.json that is there is of an earlier start"
    )
    arguments = parser.parse_args()
    folder = arguments.folder

    end = None if arguments.no_exit else parse_json(read_guarded(folder / "exit.json"))
    jobs, _ = read(folder / FILE)
    history = read_history(folder).after_failure(arguments.job, furthest_step(jobs))
    write_whole(folder / HISTORY, json.dumps(asdict(history)) + "\n")
    decision = decide(
        end,
        history,
        nodes=arguments.nodes,
        needed=arguments.needed,
        tries=arguments.tries,
        down=arguments.down,
    )
    print(decision.action, " ".join(decision.lost), " ".join(decision.reason.split()), sep="\n")


if __name__ == "__main__":
    main()
