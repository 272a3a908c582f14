"""PURE: everything that the nodes know of themselves and each other -> what is wrong, where, and what mends it.

One function per subject, in rooms of their own (rules_*.py); each takes all there is and yields findings. What comes
first in the list is what to mend first: what follows may well follow from it.
"""

from meshtrain.operate.doctor.finding import SEVERITIES, Finding
from meshtrain.operate.doctor.record import Seen
from meshtrain.operate.doctor.rules_files import files
from meshtrain.operate.doctor.rules_hosts import hosts
from meshtrain.operate.doctor.rules_meeting import meeting
from meshtrain.operate.doctor.rules_network import network
from meshtrain.operate.doctor.rules_speed import speed

RULES = (meeting, network, hosts, files, speed)
# With one of these the ranks would not find each other, or not mean the same: timing them would only time out.
BLOCKING = (
    "nodes-missing", "id-differs", "nodes-differ", "backend-differs", "node-rank-twice", "node-fell-silent",
    "ports-closed", "address-of-another", "interface-missing", "interface-wrong", "name-is-loopback",
    "name-unresolved", "torch-differs", "layout-does-not-fit", "too-few-gpus", "gpus-missing", "no-processes",
    "config-wrong", "serving-unrecognised",
)  # fmt: skip


def judge(seen: Seen) -> list[Finding]:
    """All findings: errors first, then warnings, then notes, each in the order of the rules."""
    found = [finding for rule in RULES for finding in rule(seen)]
    return sorted(found, key=lambda one: SEVERITIES.index(one.severity))


def blocking(found: list[Finding]) -> list[Finding]:
    """The errors because of which no collective is worth timing."""
    return [one for one in found if one.severity == "error" and one.id in BLOCKING]


def status(found: list[Finding]) -> int:
    """The exit status: 1 if there is an error, 0 otherwise."""
    return int(any(one.severity == "error" for one in found))
