"""Who a process is, by the environment of each launcher."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from meshtrain.errors import InputError
from meshtrain.job.environment import expand_hosts, read_environment

CASES = yaml.safe_load(Path(__file__).with_name("environments.yaml").read_text())


def variables(case: dict[str, Any]) -> dict[str, str]:
    values = CASES.get(case["of"], {}) | case.get("with", {})
    return {name: str(value) for name, value in values.items() if value is not None}


def test_who_a_process_is() -> None:
    for case in CASES["known"]:
        environment = read_environment(variables(case))
        for name, expected in case["is"].items():
            value = getattr(environment, name)
            assert (list(value) if isinstance(value, tuple) else value) == expected, (case, name)


def test_what_is_missing_or_wrong_is_named() -> None:
    for case in CASES["refused"]:
        with pytest.raises(InputError, match=case["text"]):
            read_environment(variables(case))


def test_under_srun_jobs_have_ports_of_their_own() -> None:
    """And none that Linux gives to an outgoing connection."""

    def port(job: int, step: int | str) -> int:
        environment = read_environment(
            variables({"of": "srun", "with": {"SLURM_JOB_ID": job, "SLURM_STEP_ID": step}})
        )
        assert environment.master[0] == "gpu03"
        return environment.master[1]

    ports = [port(job, step) for job in range(70) for step in range(16)]
    assert len(set(ports)) == len(ports)
    assert all(1024 <= number < 32768 for number in [*ports, port(67043327, 0)])
    assert port(77, "") == port(77, 0)


def test_node_lists() -> None:
    assert {nodes: list(expand_hosts(nodes)) for nodes in CASES["hosts"]} == CASES["hosts"]
    for nodes, problem in {
        "x[3-1]": "the range 3-1 .* runs backwards",
        "x[1-1000000000]": "has more than 1,048,576",
    }.items():
        with pytest.raises(InputError, match=problem):
            expand_hosts(nodes)
    with pytest.raises(InputError, match="is not of SLURM's form"):  # a long one at once
        expand_hosts(100 * "gpu-cluster-node-" + "[01-0x]")
