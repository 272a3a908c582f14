"""What a predicted step rests on: which link, and the order of the axes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from meshtrain.cli import plan as cli
from meshtrain.cli.search import read_keys
from meshtrain.config import Config
from meshtrain.errors import InputError
from meshtrain.foresight.hardware import Hardware, load, with_fabric
from meshtrain.foresight.network import in_network_of, in_usual_order, link_of
from meshtrain.foresight.prediction import Prediction
from meshtrain.foresight.space import KEYS, USUAL
from tests.foresight.test_calibrate import seen_by_doctor
from tests.foresight.traced import SMALL
from tests.launching import ROOT

H100 = load("h100")


def predicted(layout: str, hosts: list[int], hardware: Hardware = H100) -> Prediction:
    overrides = [*SMALL["configs/quickstart.yaml"], f"layout={layout}", "batch.global_size=64"]
    config = Config.load(ROOT / "configs/quickstart.yaml", overrides, world_size=sum(hosts))
    assert config.resolved is not None
    return Prediction(replace(config, resolved=config.resolved.on_hosts(hosts)), hardware)


def test_the_link_that_most_messages_use() -> None:
    one_host = predicted("{dp_shard: 4, tp: 2}", [8])
    assert link_of(one_host) is None
    assert in_network_of(one_host, with_fabric(H100, "efa")) == ""
    link = link_of(predicted("{dp_replicate: 2, dp_shard: 4, tp: 2}", [4] * 4))
    assert link is not None
    assert (link.axis, link.hosts) == ("dp_shard", 2)
    assert str(link) == "dp_shard over 2 hosts at 92 GB/s"
    # The axis that sends more has the word.
    tp = link_of(predicted("{tp: 4, dp_shard: 2}", [2] * 4))
    assert tp is not None
    assert (tp.axis, tp.hosts) == ("tp", 4)


def test_the_same_layout_in_another_network() -> None:
    slow = replace(H100, between_hosts=replace(H100.between_hosts, bandwidth={2: 1e-3}))
    mine = predicted("{dp_shard: 8}", [4, 4])
    there = predicted("{dp_shard: 8}", [4, 4], slow)
    assert there.step.seconds > 10 * mine.step.seconds
    assert in_network_of(mine, slow) == (
        f"with 0.001 GB/s between hosts instead of 184 this layout takes {there.step.seconds:.3g} s"
    )
    assert in_network_of(there, H100).endswith(f"{mine.step.seconds:.3g} s")


def test_axes_that_cross_hosts_by_their_order_alone() -> None:
    mistaken = predicted("{dp_shard: 4, tp: 2, pp: 2}", [2] * 8)
    usual = predicted("{pp: 2, dp_shard: 4, tp: 2}", [2] * 8)
    assert usual.step.seconds < mistaken.step.seconds
    assert in_usual_order(mistaken) == (
        "tp crosses hosts only because of the order in which axes are written: layout "
        f"{{pp: 2, dp_shard: 4, tp: 2}} takes {usual.step.seconds:.3g} s"
    )
    for layout, hosts in (
        ("{pp: 2, dp_shard: 4, tp: 2}", [2] * 8),
        ("{tp: 4, dp_shard: 4}", [16]),
        ("{dp_shard: 4, tp: 4}", [2] * 8),  # larger than a host in any order
    ):
        assert in_usual_order(predicted(layout, hosts)) == ""


def test_typos_are_found_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a plan is made")

    monkeypatch.setattr(cli, "make_plan", never)
    for options, words in (
        ({"gpu": "h1000"}, "did you mean h100?"),
        ({"gpu": "h100", "fabric": "efb"}, "did you mean efa?"),
        ({"fabric": "efa"}, "--fabric needs --gpu"),
    ):
        arguments = {"config": "x", "overrides": [], "hosts": None, "gpu": None, "fabric": None}
        with pytest.raises(InputError) as raised:
            cli._plan(type("Arguments", (), {**arguments, **options})())
        assert words in str(raised.value)
    with pytest.raises(InputError, match=r"--vary micro: .*did you mean micro_size\?"):
        read_keys("micro", "", KEYS, USUAL)


def test_a_model_that_no_single_gpu_holds_takes_hosts() -> None:
    preset = "model={name: llama, preset: llama-3.1-70b}"
    plan = cli.make_plan(str(ROOT / "configs/quickstart.yaml"), [preset])
    with pytest.raises(InputError) as raised:
        cli._check_fits(plan, H100)
    assert "a plan for 1 process, of which one keeps 1.0 TiB of the 73.7 GiB" in str(raised.value)
    assert "--hosts 4x8" in str(raised.value)
    cli._check_fits(cli.make_plan(str(ROOT / "configs/quickstart.yaml")), H100)


def test_a_report_of_the_doctor_is_a_fabric(tmp_path: Path) -> None:
    table = {2: 180.0, 4: 100.0, 8: 60.0}
    true = replace(H100, between_hosts=replace(H100.between_hosts, bandwidth=table))
    report = tmp_path / "doctor.json"
    report.write_text(json.dumps({"seen": seen_by_doctor(true)}))
    hardware, own = cli.read_hardware("h100", str(report))
    assert hardware.between_hosts.bandwidth == pytest.approx(table)
    assert own == H100
    assert hardware.band == f" +- 15 %, data sheet, links of {report}"
    assert cli.read_hardware(None, None) == []
