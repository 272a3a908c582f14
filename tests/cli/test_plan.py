"""`meshtrain plan`: what a config would do, without doing it."""

import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshtrain.cli import main as cli
from meshtrain.cli.plan import make_plan, read_hosts
from meshtrain.data.order import BatchSplit, describe_batch, share
from meshtrain.errors import InputError
from meshtrain.layout import Layout
from meshtrain.run.rank_table import describe_hosts, layout_text
from tests.launching import ROOT
from tests.properties import given, st

EXPECTED = yaml.safe_load(Path(__file__).with_name("plan.yaml").read_text())
MODEL = """
from dataclasses import dataclass
from torch import nn

@dataclass(frozen=True)
class Config:
    width: int = 6
    tied: bool = False

class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.first = nn.Linear(config.width, config.width)  # 36 + 6
        self.last = nn.Linear(config.width, config.width)
        if config.tied:
            self.last.weight = self.first.weight

    def blocks(self):
        return [self.first, self.last]

tp_plan = {"first": "colwise", "last": "rowwise"}
"""

CONFIG = """
model: {{name: {model}, width: 6}}
data: {{source: digits}}
layout: {layout}
batch: {{global_size: 64, micro_size: 4}}
train: {{steps: 50}}
"""


def write_config(folder: Path, layout: str) -> str:
    model, path = folder / "model.py", folder / "config.yaml"
    model.write_text(MODEL)
    path.write_text(CONFIG.format(model=model, layout=layout))
    return str(path)


Captured = pytest.CaptureFixture[str]


def planned(capsys: Captured, *words: str) -> str:
    """What `meshtrain plan` prints."""
    assert cli.main(["plan", *words]) == 0
    return capsys.readouterr().out


def planned_json(capsys: Captured, *words: str) -> dict[str, Any]:
    return json.loads(planned(capsys, "--json", *words))


def refused(capsys: Captured, *words: str) -> str:
    assert cli.main(["plan", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


# Lines and tables ---------------------------------------------------------------------------------


def test_the_lines_of_the_batch_and_of_the_hosts() -> None:
    for numbers, line in EXPECTED["batch"]:
        assert describe_batch(*numbers) == line
    for counts, names, line in EXPECTED["hosts"]:
        assert describe_hosts(Layout({"dp_shard": sum(counts)}).on_hosts(counts, names)) == line


@given(st.integers(1, 500), st.integers(1, 20), st.integers(1, 60))
def test_the_numbers_of_the_batch_are_those_of_the_ranks(
    global_size: int, micro_size: int, data_ranks: int
) -> None:
    batch = BatchSplit(global_size, micro_size, data_ranks)
    counts = [len(share(global_size, data_ranks, part)) for part in range(data_ranks)]
    assert batch.shares == (min(counts), max(counts))
    slots = batch.accumulation * micro_size * data_ranks
    assert batch.accumulation == math.ceil(max(counts) / micro_size)
    assert batch.idle == pytest.approx((slots - global_size) / slots)
    assert ("=" in describe_batch(global_size, micro_size, data_ranks)) == (slots == global_size)


def test_the_table_of_a_layout() -> None:
    layout = Layout({"dp_replicate": 2, "dp_shard": 3, "tp": 1}).on_hosts((4, 2), ("left", "right"))
    assert layout_text(layout) == EXPECTED["layout"]


def test_the_table_has_the_groups_of_parameters_and_of_attention() -> None:
    layout = Layout({"dp_shard": 2, "cp": 4}).with_context_heads(2).on_hosts((8,))
    titles = [
        line.partition(":")[0] for line in layout_text(layout).splitlines() if " ranks, " in line
    ]
    assert titles == ["dp_shard", "cp", "fsdp", "cp_ring", "cp_heads"]
    assert "fsdp: 1 group of 8 ranks" in layout_text(layout)
    assert "cp_ring: 4 groups of 2 ranks, none crosses hosts\n  [0, 2]  host 0" in layout_text(
        layout
    )


def test_a_long_table_loses_its_middle_and_the_file_does_not() -> None:
    layout = Layout({"dp_replicate": 8, "dp_shard": 64, "tp": 8}).on_hosts([8] * 512)
    short = layout_text(layout, 8).splitlines()
    assert len(short) < 60
    assert max(map(len, short)) < 120
    assert "... 4088 more ranks ..." in short
    # of dp_replicate and of tp
    assert sum(line.strip() == "... 508 more groups ..." for line in short) == 2
    full = layout_text(layout).splitlines()
    assert [line.split()[0] for line in full[3 : 3 + 4096]] == [str(rank) for rank in range(4096)]
    assert "crosses 512 hosts" in next(
        line for line in full if line.startswith(f"  {list(range(0, 4096, 8))} ")
    )


# The command --------------------------------------------------------------------------------------


def test_the_plan_of_a_config_on_uneven_hosts(tmp_path: Path, capsys: Captured) -> None:
    config = write_config(tmp_path, "{dp_replicate: 2, dp_shard: -1}")
    printed = planned(capsys, config, "--hosts", "4,2", "batch.global_size=32")
    assert printed.startswith(f"plan of {config}\n")
    assert set(EXPECTED["uneven"].splitlines()) <= set(printed.splitlines())


@pytest.mark.slow
def test_the_plan_in_the_docs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    text = (ROOT / "docs" / "layouts.md").read_text()
    small = re.search(r"`small.yaml`\n\n```yaml\n(.*?)```", text, re.DOTALL)
    shown = re.search(r"```\n\$ meshtrain plan (small.yaml [^\n]*)\n(.*?)```", text, re.DOTALL)
    pipeline = re.search(
        r"```\n\$ meshtrain plan (small.yaml [^\n]*pp: [^\n]*)\n\.\.\.\n(.*?)\.\.\.\n```",
        text,
        re.DOTALL,
    )
    assert small is not None
    assert shown is not None
    assert pipeline is not None
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(small[1])
    assert planned(capsys, *shown[1].split()) == shown[2]
    assert pipeline[2] in planned(capsys, *shlex.split(pipeline[1]))


def test_the_plan_as_json(tmp_path: Path, capsys: Captured) -> None:
    plan = planned_json(capsys, write_config(tmp_path, "{dp_shard: 2, tp: 2}"), "--hosts", "2x2")
    assert {name: plan[name] for name in EXPECTED["json"]} == EXPECTED["json"]
    assert plan["ranks"][3] == EXPECTED["json rank 3"]
    assert plan["batch"]["line"] == "global batch 64 = 4 per rank x 2 data ranks x 8 accumulation"
    assert plan["batch"]["idle"] == 0
    held = plan["parameters"]
    assert (held["total"], held["fewest"], held["most"]) == (84, 19, 26)
    assert held["each"][2] == EXPECTED["json of the last weight"]


WITH_EXPERTS = """
model: {name: qwen3_moe, preset: qwen3-30b-a3b}
data: {source: tokens, path: somewhere, seq_len: 8192}
layout: {dp_replicate: 2, dp_shard: 8, tp: 2}
parallel: {expert_parallel: 8}
batch: {global_size: 64, micro_size: 1}
train: {steps: 50, precision: bfloat16}
"""


@pytest.mark.slow
def test_a_plan_with_experts(tmp_path: Path, capsys: Captured) -> None:
    config = tmp_path / "experts.yaml"
    config.write_text(WITH_EXPERTS)
    hosts = (str(config), "--hosts", "4x8")
    assert set(EXPECTED["experts"].splitlines()) <= set(planned(capsys, *hosts).splitlines())
    several = [
        "layout={dp_shard: 32}",
        "parallel={expert_parallel: 32, recompute: full}",
        "model.num_experts=40",
    ]
    printed = planned(capsys, *hosts, *several)
    assert (
        "over ep 32: 2 on a rank, none on 12 ranks of ep; 1 copy\nwith even loads a layer sends 6 "
        "x " in printed
    )
    assert "warning: expert_parallel: 32 crosses hosts in 1 of 1 groups" in printed
    plan = planned_json(capsys, *hosts, "parallel.recompute=full")
    assert plan["expert_parallel"] == 8
    assert (
        plan["ranks"][13]["coordinate"].items() >= {"edp_replicate": 0, "efsdp": 1, "ep": 5}.items()
    )
    assert plan["experts"]["sent"] == 6 * plan["experts"]["message"] + 8 * 112
    name = "model.layers.7.mlp.experts.down_proj"
    (experts,) = [row for row in plan["parameters"]["each"] if row["name"] == name]
    assert (experts["over_ep"], experts["on_a_rank"]["largest"]) == ("experts", [8, 2048, 768])


def test_a_plan_in_16_bits(tmp_path: Path, capsys: Captured) -> None:
    """FSDP gathers the weights in 16 bits; without it a rank has a copy of its own."""
    for layout, on_top in (
        ("{pp: 2}", "activations and a copy of the weights in bfloat16, 84 bytes, come on top"),
        ("{dp_shard: 2}", "activations come on top"),
    ):
        printed = planned(capsys, write_config(tmp_path, layout), "train.precision=bfloat16")
        assert f"AdamW 336 bytes; {on_top}\n" in printed


def test_a_plan_of_parameters(tmp_path: Path, capsys: Captured) -> None:
    config = write_config(tmp_path, "{pp: 2, dp_shard: 2, tp: 2}")
    printed = planned(capsys, config, "--parameters", "--hosts", "8")
    assert printed.partition("\n")[2] == EXPECTED["parameters"]


def test_a_pipeline_as_json(tmp_path: Path, capsys: Captured) -> None:
    config = write_config(tmp_path, "{pp: 2, dp_replicate: -1}")
    plan = planned_json(capsys, config, "--hosts", "4", "model.tied=true")
    pipeline = plan["pipeline"]
    assert (pipeline["schedule"], pipeline["microbatches"]) == ("1f1b", 8)
    assert [(stage["pp"], stage["blocks"]) for stage in pipeline["stages"]] == [
        (0, [0, 1]),
        (1, [1, 2]),
    ]
    numbers = {"fewest_parameters": 42, "most_parameters": 42, "idle_share": pytest.approx(1 / 9)}
    assert pipeline["ranks"] == [
        {"pp": 0, "stages": [0], **numbers, "peak_activations": 2},
        {"pp": 1, "stages": [1], **numbers, "peak_activations": 1},
    ]
    # both ranks have the weight that their stages share
    assert plan["parameters"]["total"] == 36 + 6 + 6
    assert [row["stages"] for row in plan["parameters"]["each"]] == [[0, 1], [0], [1]]


def test_costs_of_stages_and_the_schedule_make_the_idle_time(capsys: Captured) -> None:
    even = ["quickstart", "layout={pp: 2}", "parallel.compile=false"]
    changes = ([], ["pipeline.split=[6, 1]"], ["pipeline.schedule=zbv"])
    evenly, unevenly, zbv = (
        planned_json(capsys, *even, *more)["pipeline"]["idle_share"] for more in changes
    )
    assert zbv < evenly < unevenly


def test_what_cannot_run_has_no_plan(tmp_path: Path, capsys: Captured) -> None:
    for layout in ("{pp: 3}", "{pp: 3, dp_shard: -1}"):
        assert re.search("layout.pp: .*2 blocks", refused(capsys, write_config(tmp_path, layout)))
    outside = tmp_path / "outside.py"
    outside.write_text(MODEL.replace("[self.first, self.last]", "[self.first, nn.Identity()]"))
    error = refused(capsys, write_config(tmp_path, "{pp: 2}"), f"model.name={outside}")
    assert "the parameter or buffer last.weight is in none of the model's blocks()" in error
    error = refused(capsys, "quickstart", "layout={dp_shard: 2, tp: 4}")
    assert "6 query heads do not divide over tp 4: use a tp of 1, 2, 3, 6" in error
    error = refused(capsys, write_config(tmp_path, "{dp_shard: 4, tp: 2}"), "--hosts", "4,2")
    assert "needs 8 processes and there are 6" in error
    assert "{dp_shard: 3, tp: 2}" in error


TAKES_LENGTH_FROM_ITS_INPUT = """
from dataclasses import dataclass
from torch import nn

@dataclass(frozen=True)
class Config:
    vocab_size: int = 256

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(self.up(x).view(*x.shape[:-1], -1))

class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(256, 8), Layer(), nn.Linear(8, 256)

    def blocks(self):
        return [self.embed, self.layer, self.head]

    def forward(self, tokens, positions=None, documents=None):
        return self.head(self.layer(self.embed(tokens)))

tp_plan = {"embed": "embedding_rowwise_sequence", "layer.up": "colwise", "layer.down": "rowwise"}
"""


def test_a_model_that_runs_only_without_sequence_parallelism(
    tmp_path: Path, capsys: Captured
) -> None:
    """As attention of transformers: a run turns it off, so the plan is that of a run without."""
    (tmp_path / "own.py").write_text(TAKES_LENGTH_FROM_ITS_INPUT)
    keys = ("quickstart", f"model={{name: {tmp_path / 'own.py'}}}", "layout={tp: 2}")
    by_default = planned(capsys, *keys, "--hosts=2")
    without = planned(capsys, *keys, "parallel.sequence_parallel=false", "--hosts=2")
    added = [line for line in by_default.splitlines() if line not in without.splitlines()]
    assert len(added) == 2
    assert added[0].startswith(
        "note: parallel.sequence_parallel is on by default: a run turns it off"
    )
    assert added[1].startswith(
        "  for parallel.sequence_parallel: false, as the run will turn it off"
    )


def test_without_hosts_a_plan_says_what_it_assumes(tmp_path: Path) -> None:
    plan = make_plan(write_config(tmp_path, "{dp_replicate: 2, dp_shard: -1}"))
    assert plan.layout == Layout({"dp_replicate": 2, "dp_shard": 1}).on_hosts((2,))
    assert plan.notes == (
        "no --hosts given: the smallest world that this layout fits, 2 processes = 1 host x 2",
    )
    plan = make_plan(write_config(tmp_path, "{dp_shard: 3}"))
    assert plan.notes == ("no --hosts given: all on one host, 3 processes = 1 host x 3",)


def test_experts_of_a_token_or_two() -> None:
    keys = [
        "model.head_dim=2",
        "model.hidden_size=4",
        "data.seq_len=1",
        "batch.micro_size=1",
        "layout={dp_shard: 2}",
    ]
    for per_token, line in ((1, "sends 0 x 0 bytes over"), (2, "sends 4 x 16 bytes over")):
        experts = [f"model.num_experts_per_tok={per_token}", "parallel.expert_parallel=2"]
        plan = make_plan("moe", [*keys, *experts])
        assert plan.experts is not None
        assert line in plan.experts.describe_sent()


def test_hosts_are_read(tmp_path: Path, capsys: Captured) -> None:
    for text, counts in EXPECTED["counts"].items():
        assert read_hosts(text) == tuple(counts)
    for text in EXPECTED["no counts"]:
        with pytest.raises(
            InputError, match=r"give one per host, such as 4,2, or 4x8 for four hosts of 8"
        ):
            read_hosts(text)
    config = write_config(tmp_path, "{dp_shard: 2}")
    assert refused(capsys, config, "--hosts=4;2").startswith("--hosts 4;2: ")
