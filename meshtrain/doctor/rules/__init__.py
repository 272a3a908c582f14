"""The rules: what all nodes know about themselves and each other -> findings, in the order to fix
them. No I/O."""

from meshtrain.doctor.findings import SENTENCES, SEVERITIES, Finding
from meshtrain.doctor.records import ClusterFacts
from meshtrain.doctor.rules.files import files
from meshtrain.doctor.rules.hosts import hosts
from meshtrain.doctor.rules.network import network
from meshtrain.doctor.rules.rendezvous import rendezvous
from meshtrain.doctor.rules.speed import speed

RULES = (rendezvous, network, hosts, files, speed)
BLOCKING = {key.partition("/")[0] for key, row in SENTENCES.items() if row.get("blocking")} | {
    "torch-differs"
}


def judge(cluster: ClusterFacts) -> list[Finding]:
    """All findings: errors first, then warnings, then notes, each in the order of the rules."""
    findings = [finding for rule in RULES for finding in rule(cluster)]
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def blocking(findings: list[Finding]) -> list[Finding]:
    """The errors that make timing collectives pointless."""
    return [
        finding for finding in findings if finding.severity == "error" and finding.id in BLOCKING
    ]
