"""torchrun's options and launchers' variables as a place to meet; interfaces as NCCL and gloo read
their names."""

import argparse
import itertools
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from meshtrain.doctor.bandwidth import choose_size, pairs_in_rounds, wire_bytes
from meshtrain.doctor.command import add_arguments
from meshtrain.doctor.facts import processes_of
from meshtrain.doctor.nccl import gloo_interfaces, nccl_interfaces
from meshtrain.doctor.ports import peers_to_check
from meshtrain.doctor.records import Interface, Place
from meshtrain.doctor.torchrun_options import read_place, speaks_for_node
from meshtrain.errors import InputError
from meshtrain.metrics.nvml import throttle_reasons
from tests.launching import environment

TABLES = yaml.safe_load(Path(__file__).with_name("torchrun_options.yaml").read_text())


def parse(line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser)
    return parser.parse_intermixed_args(line.split())


def place(line: str, variables: Mapping[str, str] | None = None) -> Place:
    return read_place(parse(line), variables or {})


def test_options_and_variables_of_launchers_are_understood() -> None:
    for row in TABLES["places"]:
        variables = row.get("variables", {})
        meeting = place(row["line"], variables)
        assert {name: plain(getattr(meeting, name)) for name in row["is"]} == row["is"], row
        if "local rank" in row:
            speaks = [
                speaks_for_node(variables | {row["local rank"]: local}, meeting)
                for local in ("0", "1")
            ]
            assert speaks == [True, False], row
    for line, words in TABLES["refused"].items():
        with pytest.raises(InputError, match=words):
            place(line)
    for name in TABLES["numbers"]:
        with pytest.raises(InputError, match=f"^{name} two: expected a number"):
            place("", TABLES["task"] | {name: "two", "MASTER_ADDR": "gpu01"})


def plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def test_the_doctor_is_run_as_a_module() -> None:
    command = [sys.executable, "-m", "meshtrain.doctor", "--nnodes=2:1"]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stderr) == (
        2,
        "--nnodes 2:1: expected a number of nodes, or MIN:MAX such as 2:4\n",
    )


def test_the_config_stands_where_the_script_would() -> None:
    arguments = parse("--nnodes=2 -m meshtrain.train my.yaml train.steps=5 --wait 3")
    assert arguments.module
    assert [arguments.config, *arguments.overrides] == [
        "meshtrain.train",
        "my.yaml",
        "train.steps=5",
    ]
    assert arguments.wait == 3.0


def test_interfaces_as_nccl_and_gloo_read_their_names() -> None:
    interfaces = [
        Interface(name, tuple(addresses)) for name, addresses in TABLES["interfaces"].items()
    ]
    for asked, chosen in TABLES["nccl"]:
        assert [each.name for each in nccl_interfaces(interfaces, asked)] == chosen, asked
    for names, chosen in TABLES["unasked"].items():
        available = [Interface(name, ("10.0.0.1",)) for name in names.split()]
        assert [each.name for each in nccl_interfaces(available, None)] == [chosen], names
    for asked, own, chosen in TABLES["gloo"]:
        assert [each.name for each in gloo_interfaces(interfaces, asked, own)] == chosen, (
            asked,
            own,
        )


def test_every_pair_of_few_hosts_meets_once_and_many_hosts_meet_some() -> None:
    for count in range(10):
        rounds = pairs_in_rounds(count, most=9)
        assert sorted(itertools.chain(*rounds)) == list(itertools.combinations(range(count), 2))
        for pairs in rounds:
            busy = list(itertools.chain(*pairs))
            assert len(busy) == len(set(busy)), "nobody has two partners"
    assert len(pairs_in_rounds(1000)) == 7
    assert peers_to_check(3, 4) == [0, 1, 2]
    many = peers_to_check(999, 1000)
    assert many[:4] == [0, 1, 3, 7]
    assert len(many) == 10


def test_the_size_of_a_message_follows_from_the_time_of_a_small_one() -> None:
    sizes = (2**20, 2**24)
    assert [choose_size(seconds, sizes) for seconds in (1e-5, 1e-2, 1.0)] == [2**24, 2**20, 2**18]
    sent = {"all-reduce": 12, "all-gather": 6, "broadcast": 8}
    assert {collective: wire_bytes(collective, 4, 8) for collective in sent} == sent


def test_throttle_reasons_in_words() -> None:
    assert throttle_reasons(0) == ""
    assert throttle_reasons(0x1) == "", "an idle GPU is not slowed down"
    assert throttle_reasons(0x44) == "the power limit, heat (hardware)"


def test_the_number_of_processes() -> None:
    for asked, gpus, count in TABLES["processes"]:
        assert processes_of(asked, gpus, 16) == count, (asked, gpus)
