"""`meshtrain plan` and the console script around it: what a config would do, without doing it."""

import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from meshtrain.cli import main as cli
from meshtrain.cli.plan import make_plan, read_hosts
from meshtrain.data.order import BatchSplit, describe_batch, share
from meshtrain.errors import InputError
from meshtrain.layout import Layout
from meshtrain.run.rank_table import describe_hosts, layout_text
from tests.properties import given, st

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


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path, "{dp_replicate: 2, dp_shard: -1}")


def write_config(folder: Path, layout: str) -> Path:
    model, path = folder / "model.py", folder / "config.yaml"
    model.write_text(MODEL)
    path.write_text(CONFIG.format(model=model, layout=layout))
    return path


# The line of the batch ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "line"),
    [
        ((512, 8, 32), "global batch 512 = 8 per rank x 32 data ranks x 2 accumulation"),
        ((4, 4, 1), "global batch 4 = 4 per rank x 1 data rank x 1 accumulation"),
        (
            (512, 8, 6),
            "global batch 512 over 6 data ranks: 85 or 86 samples a rank, 11 accumulation of 8, 3 % of the slots idle",
        ),
        (
            (512, 3, 32),
            "global batch 512 over 32 data ranks: 16 samples a rank, 6 accumulation of 3, 11 % of the slots idle",
        ),
        (
            (2, 1, 3),
            "global batch 2 over 3 data ranks: 0 or 1 samples a rank, 1 accumulation of 1, 33 % of the slots idle",
        ),
        ((1, 2, 1), "global batch 1 over 1 data rank: 1 sample a rank, 1 accumulation of 2, 50 % of the slots idle"),
    ],
)
def test_the_line_of_the_batch(numbers: tuple[int, int, int], line: str) -> None:
    assert describe_batch(*numbers) == line


@given(st.integers(1, 500), st.integers(1, 20), st.integers(1, 60))
def test_the_numbers_of_the_batch_are_those_of_the_ranks(global_size: int, micro_size: int, data_ranks: int) -> None:
    batch = BatchSplit(global_size, micro_size, data_ranks)
    counts = [len(share(global_size, data_ranks, part)) for part in range(data_ranks)]
    assert batch.shares == (min(counts), max(counts))
    slots = batch.accumulation * micro_size * data_ranks
    assert batch.accumulation == math.ceil(max(counts) / micro_size)
    assert batch.idle == pytest.approx((slots - global_size) / slots)
    assert ("=" in describe_batch(global_size, micro_size, data_ranks)) == (slots == global_size)


# Hosts and the table ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "names", "line"),
    [
        ((8, 8, 8, 8), None, "32 processes = 4 hosts x 8"),
        ((4, 2), None, "6 processes = 4 on host 0 + 2 on host 1"),
        ((1,), None, "1 process = 1 host x 1"),
        ((1, 1, 1, 1), "abab", "4 processes = 2 hosts x 2"),
        ([8] * 12 + [4], None, "100 processes = 12 hosts x 8 + 1 host x 4"),
    ],
)
def test_the_line_of_the_hosts(counts: list[int], names: str | None, line: str) -> None:
    assert describe_hosts(Layout({"dp_shard": sum(counts)}).on_hosts(counts, names)) == line


def test_the_table_of_a_layout() -> None:
    layout = Layout({"dp_replicate": 2, "dp_shard": 3, "tp": 1}).on_hosts((4, 2), ("left", "right"))
    assert layout_text(layout) == (
        "layout {dp_replicate: 2, dp_shard: 3, tp: 1} on 6 processes = 4 on left + 2 on right\n"
        "\n"
        "rank  host   local  dp_replicate  dp_shard  tp\n"
        "0     left   0      0             0         0\n"
        "1     left   1      0             1         0\n"
        "2     left   2      0             2         0\n"
        "3     left   3      1             0         0\n"
        "4     right  0      1             1         0\n"
        "5     right  1      1             2         0\n"
        "\n"
        "dp_replicate: 3 groups of 2 ranks, 2 cross hosts\n"
        "  [0, 3]  left\n"
        "  [1, 4]  crosses hosts: left, right\n"
        "  [2, 5]  crosses hosts: left, right\n"
        "\n"
        "dp_shard: 2 groups of 3 ranks, 1 crosses hosts\n"
        "  [0, 1, 2]  left\n"
        "  [3, 4, 5]  crosses hosts: left, right\n"
        "\n"
        "data (dp_replicate x dp_shard): 1 group of 6 ranks, each crosses hosts\n"
        "  [0, 1, 2, 3, 4, 5]  crosses hosts: left, right\n"
    )


def test_the_table_has_the_groups_of_parameters_and_of_attention() -> None:
    layout = Layout({"dp_shard": 2, "cp": 4}).with_context_heads(2).on_hosts((8,))
    titles = [line.partition(":")[0] for line in layout_text(layout).splitlines() if " ranks, " in line]
    assert titles == ["dp_shard", "cp", "fsdp", "cp_ring", "cp_heads"]
    assert "fsdp: 1 group of 8 ranks" in layout_text(layout)
    assert "cp_ring: 4 groups of 2 ranks, none crosses hosts\n  [0, 2]  host 0" in layout_text(layout)


def test_a_long_table_loses_its_middle_and_the_file_does_not() -> None:
    layout = Layout({"dp_replicate": 8, "dp_shard": 64, "tp": 8}).on_hosts([8] * 512)
    short = layout_text(layout, 8).splitlines()
    assert len(short) < 60
    assert max(map(len, short)) < 120
    assert "... 4088 more ranks ..." in short
    assert sum(line.strip() == "... 508 more groups ..." for line in short) == 2  # of dp_replicate and of tp
    full = layout_text(layout).splitlines()
    assert [line.split()[0] for line in full[3 : 3 + 4096]] == [str(rank) for rank in range(4096)]
    assert "crosses 512 hosts" in next(line for line in full if line.startswith(f"  {list(range(0, 4096, 8))} "))


# The command --------------------------------------------------------------------------------------------------------


def test_the_plan_of_a_config_on_uneven_hosts(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(config), "--hosts", "4,2", "batch.global_size=32"]) == 0
    output = capsys.readouterr().out
    assert f"plan of {config}\n" in output
    assert "6 processes = 4 on host 0 + 2 on host 1" in output
    assert "layout {dp_replicate: 2, dp_shard: 3}" in output
    assert (
        "global batch 32 over 6 data ranks: 5 or 6 samples a rank, 2 accumulation of 4, 33 % of the slots idle"
        in output
    )
    assert "84 parameters, 28 per rank" in output
    assert "a rank keeps 448 bytes in float32: weights 112 bytes, gradients 112 bytes, AdamW 224 bytes" in output
    assert re.search(r"^4 +host 1 +0 +1 +1$", output, re.MULTILINE)
    assert "[1, 4]  crosses hosts: host 0, host 1" in output


def test_the_plan_in_the_docs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "layouts.md").read_text()
    small = re.search(r"`small.yaml`\n\n```yaml\n(.*?)```", text, re.DOTALL)
    shown = re.search(r"```\n\$ meshtrain (plan small.yaml [^\n]*)\n(.*?)```", text, re.DOTALL)
    assert small is not None
    assert shown is not None
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(small[1])
    assert cli.main(shown[1].split()) == 0
    assert capsys.readouterr().out == shown[2]
    pipeline = re.search(
        r"```\n\$ meshtrain (plan small.yaml [^\n]*pp: [^\n]*)\n\.\.\.\n(.*?)\.\.\.\n```", text, re.DOTALL
    )
    assert pipeline is not None
    assert cli.main(shlex.split(pipeline[1])) == 0
    assert pipeline[2] in capsys.readouterr().out


def test_the_plan_as_json(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--json", str(config), "layout={dp_shard: 2, tp: 2}", "--hosts", "2x2"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["layout"] == {"dp_shard": 2, "tp": 2}
    assert plan["world_size"] == 4
    assert plan["hosts"] == {"host 0": 2, "host 1": 2}
    assert plan["ranks"][3] == {"rank": 3, "host": "host 1", "local_rank": 1, "coordinate": {"dp_shard": 1, "tp": 1}}
    assert plan["groups"] == [
        {"axes": ["dp_shard"], "groups": [{"ranks": r, "crosses_hosts": True} for r in ([0, 2], [1, 3])]},
        {"axes": ["tp"], "groups": [{"ranks": r, "crosses_hosts": False} for r in ([0, 1], [2, 3])]},
    ]
    assert plan["batch"]["line"] == "global batch 64 = 4 per rank x 2 data ranks x 8 accumulation"
    assert plan["batch"]["idle"] == 0
    held = plan["parameters"]
    assert (held["total"], held["fewest"], held["most"]) == (84, 19, 26)
    assert held["each"][2] == {
        "name": "last.weight",
        "tied": [],
        "shape": [6, 6],
        "layer": "RowParallelLinear",
        "stages": [0],
        "over_tp": "columns",
        "after_tp": {"largest": [6, 3], "smallest": [6, 3]},
        "over_ep": "held by all",
        "on_a_rank": {"largest": [3, 3], "smallest": [3, 3]},
    }
    assert plan["pipeline"] is None
    assert plan["warnings"] == []


WITH_EXPERTS = """
model: {name: qwen3_moe, preset: qwen3-30b-a3b}
data: {source: tokens, path: somewhere, seq_len: 8192}
layout: {dp_replicate: 2, dp_shard: 8, tp: 2}
parallel: {expert_parallel: 8}
batch: {global_size: 64, micro_size: 1}
train: {steps: 50, precision: bfloat16}
"""


def test_a_plan_with_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "experts.yaml"
    config.write_text(WITH_EXPERTS)
    assert cli.main(["plan", str(config), "--hosts", "4x8"]) == 0
    text = capsys.readouterr().out
    for line in (
        "30,532,122,624 parameters, 3,353,032,704 active a token, 1,909,057,280 per rank",
        "experts: 48 layers x 128, 8 a token; over ep 8: 16, over efsdp 2: 8 on a rank; 2 copies",
        "with even loads a layer sends 4 x 112 MiB over ep for a microbatch of 4,096 tokens",
        "rank  host    local  dp_replicate  dp_shard  tp  edp_replicate  efsdp  ep",
        "31    host 3  7      1             7         1   1              1      7",
        "ep: 4 groups of 8 ranks, none crosses hosts",
        "efsdp: 16 groups of 2 ranks, each crosses hosts",
        "edp_replicate: 16 groups of 2 ranks, each crosses hosts",
    ):
        assert line in text.splitlines()
    several = ["layout={dp_shard: 32}", "parallel={expert_parallel: 32, recompute: full}", "model.num_experts=40"]
    assert cli.main(["plan", str(config), "--hosts", "4x8", *several]) == 0
    text = capsys.readouterr().out
    assert "over ep 32: 2 on a rank, none on 12 ranks of ep; 1 copy\nwith even loads a layer sends 6 x " in text
    assert "warning: expert_parallel: 32 crosses hosts in 1 of 1 groups" in text
    assert cli.main(["plan", str(config), "--json", "--hosts", "4x8", "parallel.recompute=full"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["expert_parallel"] == 8
    assert plan["ranks"][13]["coordinate"].items() >= {"edp_replicate": 0, "efsdp": 1, "ep": 5}.items()
    assert plan["experts"]["sent"] == 6 * plan["experts"]["message"] + 8 * 112
    (experts,) = [one for one in plan["parameters"]["each"] if one["name"] == "model.layers.7.mlp.experts.down_proj"]
    assert (experts["over_ep"], experts["on_a_rank"]["largest"]) == ("experts", [8, 2048, 768])


def test_a_plan_warns_of_tp_across_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path, "{dp_shard: -1, tp: 2}")
    assert cli.main(["plan", str(config), "--hosts", "3,1"]) == 0
    output = capsys.readouterr().out
    assert "warning: tp crosses hosts in 1 of 2 groups" in output
    assert "84 parameters, 19 to 26 per rank" in output


@pytest.mark.parametrize(
    ("layout", "on_top"),
    [
        ("{pp: 2}", "activations and a copy of the weights in bfloat16, 84 bytes, come on top"),
        ("{dp_shard: 2}", "activations come on top"),
    ],
)
def test_a_plan_in_16_bits(layout: str, on_top: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """FSDP gathers the weights in 16 bits; without it a rank has a copy of its own."""
    config = write_config(tmp_path, layout)
    assert cli.main(["plan", str(config), "train.precision=bfloat16"]) == 0
    assert f"AdamW 336 bytes; {on_top}\n" in capsys.readouterr().out


def test_a_plan_of_parameters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path, "{pp: 2, dp_shard: 2, tp: 2}")
    assert cli.main(["plan", str(config), "--parameters", "--hosts", "8"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "global batch 64 = 4 per rank x 2 data ranks x 8 accumulation",
        "84 parameters, 7 to 14 per rank",
        "a rank keeps 224 bytes in float32: weights 56 bytes, gradients 56 bytes, AdamW 112 bytes; activations come on "
        "top",
        "",
        "pipeline 1f1b, 8 microbatches; 2 blocks in 2 stages: 1 + 1, the largest stage less than 1 % above the mean; "
        "11.1 % idle",
        "pp  stages  blocks  parameters of a rank  idle    stage forwards held",
        "0   0       0       7 to 14               11.1 %  2",
        "1   1       1       12                    11.1 %  1",
        "(simulated: a stage's input gradients and its weight gradients take as long as its forward each, transfers "
        "nothing)",
        "",
        "layout {pp: 2, dp_shard: 2, tp: 2} on 8 processes = 1 host x 8",
        "",
        "parameter       stage  whole  layer                 over tp       after tp  after dp_shard",
        "first.weight    0      6 x 6  ColumnParallelLinear  rows / tp     3 x 6     2 to 1 x 6",
        "first.bias      0      6      ColumnParallelLinear  rows / tp     3         2 to 1",
        "last.weight     1      6 x 6  RowParallelLinear     columns / tp  6 x 3     3 x 3",
        "last.bias       1      6      RowParallelLinear     held by all   6         3",
    ]


def test_a_pipeline_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path, "{pp: 2, dp_replicate: -1}")
    assert cli.main(["plan", str(config), "--hosts", "4", "--json", "model.tied=true"]) == 0
    plan = json.loads(capsys.readouterr().out)
    pipeline = plan["pipeline"]
    assert (pipeline["schedule"], pipeline["microbatches"]) == ("1f1b", 8)
    assert [(stage["pp"], stage["blocks"]) for stage in pipeline["stages"]] == [(0, [0, 1]), (1, [1, 2])]
    numbers = {"fewest_parameters": 42, "most_parameters": 42, "idle_share": pytest.approx(1 / 9)}
    assert pipeline["ranks"] == [
        {"pp": 0, "stages": [0], **numbers, "peak_activations": 2},
        {"pp": 1, "stages": [1], **numbers, "peak_activations": 1},
    ]
    assert plan["parameters"]["total"] == 36 + 6 + 6  # both ranks have the weight that their stages share
    assert [one["stages"] for one in plan["parameters"]["each"]] == [[0, 1], [0], [1]]


def test_costs_of_stages_and_the_schedule_make_the_idle_time(capsys: pytest.CaptureFixture[str]) -> None:
    even = ["plan", "quickstart", "layout={pp: 2}", "parallel.compile=false", "--json"]
    idle = []
    for more in ([], ["pipeline.split=[6, 1]"], ["pipeline.schedule=zbv"]):
        assert cli.main([*even, *more]) == 0
        idle.append(json.loads(capsys.readouterr().out)["pipeline"]["idle_share"])
    assert idle[2] < idle[0] < idle[1]


def test_a_pipeline_that_cannot_run_has_no_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for layout in ("{pp: 3}", "{pp: 3, dp_shard: -1}"):
        assert cli.main(["plan", str(write_config(tmp_path, layout))]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "layout.pp: " in captured.err
        assert "2 blocks" in captured.err
    outside = tmp_path / "outside.py"
    outside.write_text(MODEL.replace("[self.first, self.last]", "[self.first, nn.Identity()]"))
    assert cli.main(["plan", str(write_config(tmp_path, "{pp: 2}")), f"model.name={outside}"]) == 2
    assert "the parameter last.weight is in none of the model's blocks()" in capsys.readouterr().err


def test_a_model_that_cannot_be_split_has_no_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "quickstart", "layout={dp_shard: 2, tp: 4}"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "6 query heads do not divide over tp 4: use a tp of 1, 2, 3, 6" in captured.err


def test_without_hosts_a_plan_says_what_it_assumes(tmp_path: Path) -> None:
    plan = make_plan(str(write_config(tmp_path, "{dp_replicate: 2, dp_shard: -1}")))
    assert plan.layout == Layout({"dp_replicate": 2, "dp_shard": 1}).on_hosts((2,))
    assert plan.notes == ("no --hosts given: the smallest world that this layout fits, 2 processes = 1 host x 2",)
    plan = make_plan(str(write_config(tmp_path, "{dp_shard: 3}")))
    assert plan.notes == ("no --hosts given: all on one host, 3 processes = 1 host x 3",)


@pytest.mark.parametrize(("per_token", "line"), [(1, "sends 0 x 0 bytes over"), (2, "sends 4 x 16 bytes over")])
def test_experts_of_a_token_or_two(per_token: int, line: str) -> None:
    model = [f"model.num_experts_per_tok={per_token}", "model.head_dim=2", "model.hidden_size=4"]
    others = ["data.seq_len=1", "batch.micro_size=1", "layout={dp_shard: 2}", "parallel.expert_parallel=2"]
    plan = make_plan("moe", [*model, *others])
    assert plan.experts is not None
    assert line in plan.experts.describe_sent()


def test_what_no_file_of_weights_has_is_no_parameter() -> None:
    """The published number of Qwen3-30B-A3B, whose routers remember the loads of their experts."""
    plan = make_plan("quickstart", ["model={name: qwen3_moe, preset: qwen3-30b-a3b}", "layout={dp_shard: 1}"])
    assert plan.memory.total == plan.memory.most == 30_532_122_624


def test_a_layout_that_does_not_fit_the_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path, "{dp_shard: 4, tp: 2}")
    assert cli.main(["plan", str(config), "--hosts", "4,2"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "needs 8 processes and there are 6" in captured.err
    assert "{dp_shard: 3, tp: 2}" in captured.err


@pytest.mark.parametrize(
    ("text", "counts"), [("4,2", (4, 2)), ("4x8", (8, 8, 8, 8)), ("2x8,4", (8, 8, 4)), (" 4 , 2 ", (4, 2)), ("7", (7,))]
)
def test_hosts_are_read(text: str, counts: tuple[int, ...]) -> None:
    assert read_hosts(text) == counts


@pytest.mark.parametrize("text", ["", "4,", "0", "0x4", "4x0", "-1", "a", "4x", "x4", "1.5", "2x2x2", "4;2"])
def test_hosts_that_cannot_be_read(text: str, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match=r"give one per host, such as 4,2, or 4x8 for four hosts of 8"):
        read_hosts(text)
    assert cli.main(["plan", str(config), f"--hosts={text}"]) == 2
    assert capsys.readouterr().err.startswith(f"--hosts {text}: ")


# The console script -------------------------------------------------------------------------------------------------


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["--help"], ["-h"]):
        assert cli.main(argv) == 0
        output = capsys.readouterr().out
        assert all(name in output and about in output for name, (_, about, _) in cli.COMMANDS.items())
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", "--help"])
    assert ended.value.code == 0
    assert "--hosts" in capsys.readouterr().out


def test_a_command_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plam"]) == 2
    assert capsys.readouterr().err == "meshtrain has no command 'plam' (did you mean plan?)\n"
    assert cli.main(["train"]) == 2
    assert "there are: new, plan, search" in capsys.readouterr().err


def test_arguments_that_a_command_does_not_have(config: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", str(config), "--host", "4"])
    assert ended.value.code == 2


def test_the_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli.importlib.metadata, "version", {"meshtrain": "1.2.3"}.__getitem__)
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == "meshtrain 1.2.3\n"


def test_the_command_line_starts_without_torch() -> None:
    code = "import sys, meshtrain.cli.main, meshtrain.cli.plan; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "meshtrain.cli.plan" in modules
    assert "torch" not in modules


def test_a_reader_that_has_seen_enough(tmp_path: Path) -> None:
    config = write_config(tmp_path, "{dp_shard: 2000}")
    command = [sys.executable, "-m", "meshtrain.cli", "plan", str(config), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(60) == 0
    process.stderr.close()
