"""Memory by blocks is that of the whole traced step, and what a plan and a run say of it."""

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshtrain.config import Config, spec_of
from meshtrain.errors import bytes_text
from meshtrain.foresight import compiled, predict, prediction, start
from meshtrain.foresight.hardware import load
from meshtrain.foresight.live import LiveBytes
from meshtrain.foresight.parameters import held_by_ranks, parameter_specs
from meshtrain.foresight.prediction import Prediction
from meshtrain.layout import Layout
from meshtrain.modeling.kinds import UntracedError
from meshtrain.parallel.mixed_precision import state_parameters
from meshtrain.pipeline.schedule import NAMES, build
from tests.foresight.traced import LLAMA, of_whole_step
from tests.launching import ROOT

QUICKSTART = str(ROOT / "configs/quickstart.yaml")


def loaded(world_size: int, *overrides: str, compiled: bool = False) -> Config:
    compile_too = f"parallel.compile={str(compiled).lower()}"
    return Config.load(QUICKSTART, [*LLAMA, compile_too, *overrides], world_size=world_size)


BF16 = "train.precision=bfloat16"
OF_PP = "layout={pp: 4}", "model.num_hidden_layers=8", "batch.global_size=16", BF16
PREDICTING = ("model.name=glm4_moe", "model.num_nextn_predict_layers=1")
EXPERTS = ("model.name=qwen3_moe", "model.num_experts=8", "parallel.expert_parallel=2")
# overrides, and how far arithmetic over blocks may be from the whole trace
BY_BLOCKS = {
    "DDP": ("layout={dp_replicate: 2}", BF16),
    "ZeRO-1": ("layout={dp_replicate: 2}", "parallel.shard_optimizer=true"),
    "FSDP": ("layout={dp_shard: 2}", BF16),
    "FSDP, full": ("layout={dp_shard: 2}", BF16, "parallel.recompute=full"),
    "FSDP, one microbatch": ("layout={dp_shard: 2}", BF16, "batch.global_size=4"),
    "FSDP that keeps": ("layout={dp_shard: 2}", BF16, "parallel.reshard_after_forward=false"),
    "LoRA": ("layout={dp_shard: 2}", BF16, "train.lora={rank: 8}"),
    "tp": ("layout={tp: 2}", "parallel.recompute=selective"),
    "cp": ("layout={cp: 2}",),
    "experts, each sharded": ("layout={dp_shard: 4}", BF16, *EXPERTS),
    "a further token": ("layout={dp_shard: 2}", BF16, *PREDICTING),
    "pp": ("layout={pp: 2, dp_shard: 2}", BF16),
    **{f"pp, {name}": (*OF_PP, f"pipeline.schedule={name}") for name in NAMES},
    "pp, zb-h1, full": (*OF_PP, "pipeline.schedule=zb-h1", "parallel.recompute=full"),
}
QUICK = ("FSDP", "tp", "a further token", "experts, each sharded", "pp, zb-h1")
WORLDS = {"layout={pp: 4}": 4, "layout={dp_shard: 4}": 4, "layout={pp: 2, dp_shard: 2}": 4}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in BY_BLOCKS],
)
def test_memory_by_blocks_is_what_the_whole_step_takes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To 3 % of a model whose blocks are so small that a batch of tokens and messages count."""
    monkeypatch.setattr("meshtrain.foresight.units.MIN_UNIT_SIZE", 0)
    monkeypatch.setattr("meshtrain.parallel.fsdp.MIN_UNIT_SIZE", 0)
    monkeypatch.setattr(prediction, "SHORT", 10**6)
    overrides = BY_BLOCKS[name]
    config = loaded(WORLDS.get(overrides[0], 2), *overrides)
    by_blocks = Prediction(config).memory
    whole = of_whole_step(config, by_blocks)
    assert by_blocks.total == pytest.approx(whole.total, rel=0.03), (by_blocks, whole)


# A user's model: a llama, with something of its own.
OWN = """
from dataclasses import dataclass, replace
from meshtrain.job.locate import model_file

llama = model_file("llama")

@dataclass(frozen=True)
class Config(llama.Config):
    pass

class Model(llama.Model):
"""
KINDS = """
    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers[2::3]:
            layer.mlp = llama.MLP(replace(config, intermediate_size=2 * config.intermediate_size))
"""
DEEP = """
    def forward(self, tokens, positions, documents=None):
        self.model.layers[3].mlp  # one that hands on what it gets has none
        return super().forward(tokens, positions, documents)
"""


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["layout={dp_replicate: 2}", "layout={pp: 2}"])
def test_kinds_that_alternate(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "SHORT", 10**6)
    file = tmp_path / "kinds.py"
    file.write_text(OWN + KINDS)
    keys = f"model.name={file}", "model.num_hidden_layers=16", layout, "batch.global_size=16"
    by_blocks, whole = (Prediction(loaded(2, *keys), exact=exact).memory for exact in (False, True))
    assert by_blocks.total == pytest.approx(whole.total, rel=0.02)


@pytest.mark.parametrize(
    "layout",
    ["layout={dp_shard: 2}", pytest.param("layout={pp: 2}", marks=pytest.mark.slow)],
)
def test_a_batch_that_grows_takes_what_its_largest_one_does(layout: str) -> None:
    overrides = layout, "pipeline.schedule=gpipe"
    grown, largest, first = (
        Prediction(loaded(2, *overrides, f"batch.global_size={sizes}"), exact=True)
        for sizes in ("[[0, 4], [2, 12], [5, 8]]", "12", "4")
    )
    assert grown.memory == largest.memory
    assert grown.microbatches == largest.microbatches > first.microbatches
    assert grown.memory.total > first.memory.total


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "overrides"),
    [
        (2, ("layout={dp_shard: 2}", "parallel.recompute=selective")),
        (2, ("layout={tp: 2}", "parallel.recompute=full")),
        (2, ("layout={pp: 2}",)),
        (4096, ("layout={dp_shard: 4096}", "batch.global_size=4096")),  # shards are padded
        (2, ("layout={dp_replicate: 2}", "train.lora={rank: 8}", "batch.micro_size=1")),
        (2, ("layout={dp_shard: 2}", "train.lora={rank: 8}", "batch.micro_size=1")),
    ],
)
def test_memory_by_blocks_of_larger_blocks(
    world: int, overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As large as those of models that are trained: to 1 %."""
    monkeypatch.setattr(prediction, "SHORT", 10**6)
    sizes = (
        "model.hidden_size=512",
        "model.intermediate_size=1408",
        "model.num_hidden_layers=4",
        "data.seq_len=512",
    )
    config = loaded(world, *sizes, "train.precision=bfloat16", *overrides)
    by_blocks, whole = (Prediction(config, exact=exact).memory for exact in (False, True))
    assert by_blocks.total == pytest.approx(whole.total, rel=0.01), (by_blocks, whole)


@pytest.mark.parametrize(
    ("world", "overrides"),
    [
        (3, ("layout={dp_shard: 3}", "optimizer.name=muon", "optimizer.ema_decay=0.9")),
        (
            6,
            (
                "layout={dp_replicate: 3, tp: 2}",
                "parallel.shard_optimizer=true",
                "optimizer.state_precision=bfloat16",
            ),
        ),
        (2, ("layout={dp_shard: 2}", 'train.freeze=["*embed*"]', "train.precision=float64")),
        (4, ("model.name=qwen3_moe", "parallel.expert_parallel=2", "layout={dp_shard: 4}")),
    ],
)
def test_what_a_rank_keeps_is_one_number(world: int, overrides: tuple[str, ...]) -> None:
    """Weights, gradients and states are the same in the lines of a plan, in a search and in a
    trace, which count the state of modules (the loads of experts) with the weights."""
    config = loaded(world, *overrides)
    layout, precision, optimizer = config.resolved, config.train.precision, config.optimizer
    specs = parameter_specs(spec_of(config), layout)
    shares = config.parallel.shard_optimizer
    plan = held_by_ranks(specs, layout, precision, optimizer, shard_optimizer=shares)
    search = Prediction(config).memory.resident
    trace = Prediction(config, exact=True).memory.resident
    of_modules = sum(parameter.nbytes for parameter in state_parameters(spec_of(config).meta))
    for part, nbytes in (
        ("weights", plan.weight_bytes + of_modules),
        ("gradients", plan.gradient_bytes),
        ("optimizer state", plan.optimizer_bytes),
    ):
        assert (part, nbytes) == (part, search[part]) == (part, trace[part])


@pytest.mark.slow
def test_each_knob_gives_back_what_its_own_trace_says() -> None:
    overrides = [*LLAMA, "layout={tp: 2}"]
    before = predict(QUICKSTART, overrides, hosts=(2,))
    assert set(before.saves) == {
        "parallel.offload=optimizer",
        "parallel.offload=both",
        "parallel.recompute=selective",
        "parallel.recompute=full",
        "batch.micro_size=1",
        "parallel.regather=true",
    }
    after = predict(QUICKSTART, [*overrides, "parallel.recompute=full"], hosts=(2,))
    assert before.saves["parallel.recompute=full"] == (
        before.memory.total - after.memory.total,
        None,
    )
    assert before.json()["memory"]["ranks"][0]["peak"] == before.memory.total


@pytest.mark.parametrize(
    "overrides",
    [
        "train.precision=float64 parallel.compile=true",
        "train.precision=bfloat16 train.linear_precision=float8 model.hidden_size=128 "
        "model.intermediate_size=256",
        'train.freeze=["*embed*","*.layers.0.*"] parallel.recompute=full parallel.compile=true',
    ],
)
def test_what_is_seldom_is_foreseen_too(overrides: str) -> None:
    seldom = Prediction(loaded(2, *overrides.split()), load("h100"), exact=True)
    assert min(seldom.memory.total, seldom.step.parts["backward"]) > 0


def test_a_model_that_does_not_run_with_few_blocks_is_traced_whole(tmp_path: Path) -> None:
    file = tmp_path / "deep.py"
    file.write_text(OWN + DEEP)
    keys = "model.num_hidden_layers=5", "layout={dp_shard: 2}", "batch.global_size=64"
    deep, plain = (
        Prediction(loaded(2, *keys, *name), load("h100"), exact=True)
        for name in ((f"model.name={file}",), ())
    )
    assert abs(deep.memory.total - plain.memory.total) <= 16 * 64
    assert deep.step.seconds == pytest.approx(plain.step.seconds)


def test_a_model_that_cannot_be_traced_says_why(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text(OWN + DEEP.replace("layers[3]", "layers[30]"))
    broken = Prediction(loaded(2, "layout={dp_shard: 2}", f"model.name={file}"), exact=True)
    for name in ("memory", "works"):
        with pytest.raises(UntracedError, match="does not run on the meta device"):
            getattr(broken, name)


def test_a_schedule_of_a_file(tmp_path: Path) -> None:
    """It is foreseen as the named one that it holds; half as many samples are more microbatches
    than it has."""
    file = tmp_path / "1f1b.csv"  # a name that says nothing
    actions = build("zb-h1", ranks=2, microbatches=4).actions
    file.write_text("\n".join(",".join(map(str, row)) for row in actions))
    keys = "layout={pp: 2}", "batch.global_size=8"
    of_file, named = (loaded(2, *keys, f"pipeline.schedule={name}") for name in (file, "zb-h1"))
    a, b = (Prediction(config, load("h100"), exact=True) for config in (of_file, named))
    assert (a.ranks, a.step) == (b.ranks, b.step)
    by_blocks, of_named = (Prediction(config, load("h100")) for config in (of_file, named))
    assert by_blocks.memory == of_named.memory
    fewer = {key: saved for key, saved in of_named.saves.items() if key != "batch.micro_size=1"}
    assert by_blocks.saves == fewer


def counted(function: Callable, name: str, counts: Counter[str]) -> Callable:
    def counting(*arguments: Any, **keys: Any) -> Any:
        counts[name] += 1
        return function(*arguments, **keys)

    return counting


@pytest.mark.slow
def test_the_work_of_a_plan_of_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 131,072: the graphs of one block for what is and for each knob; no list of ranks for each
    parameter or operator."""
    counts, offsets = Counter[str](), Layout._offsets

    def listed(*arguments: Any) -> list[int]:
        ranks = offsets(*arguments)
        counts["ranks"] += len(ranks)
        return ranks

    for owner, name in ((compiled.Graph, "__init__"), (LiveBytes, "look")):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name), name, counts))
    monkeypatch.setattr(Layout, "_offsets", listed)
    overrides = [
        *LLAMA,
        "model.num_hidden_layers=40",
        "layout={dp_shard: -1}",
        "parallel.compile=true",
    ]
    overrides += ["batch.global_size=131072", "batch.micro_size=1"]
    predict("quickstart", overrides, [8] * 16384).saves  # noqa: B018  (computed when it is asked for)
    assert counts["__init__"] == 8
    assert counts["look"] < 10_000
    assert counts["ranks"] < 10 * 131_072


def test_a_run_says_before_it_starts_that_it_will_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "PATIENCE_S", 300)
    monkeypatch.setenv(start.ROOM, "1.601")  # of which libraries take 1.6
    config, cpu = loaded(1), torch.device("cpu")
    total = predict(QUICKSTART, LLAMA, hosts=(1,)).memory.total
    error = torch.OutOfMemoryError("CUDA out of memory")
    with (
        suppress(torch.OutOfMemoryError),
        start.MemoryForecast(tmp_path, cpu, config, 0) as forecast,
    ):
        verdict, parts, knobs = forecast.note()
        assert verdict.startswith(f"memory: {bytes_text(total)} at the peak")
        assert verdict.endswith("does not fit")
        assert "activations" in parts
        assert "parallel.recompute=full" in knobs
        assert [file.name for file in tmp_path.iterdir()] == ["memory.txt"]
        raise error
    assert error.__notes__ == [verdict, parts, knobs]


@pytest.mark.slow
def test_a_run_that_turns_sequence_parallelism_off_foresees_the_memory_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "PATIENCE_S", 300)
    monkeypatch.setenv(start.ROOM, "1.6001")  # of which libraries take 1.6
    model = nn.Module()
    vars(model)["has_sequence_part"] = False
    config = loaded(2, "layout={tp: 2}", "parallel.verify=true")
    with start.MemoryForecast(tmp_path, torch.device("cpu"), config, 0) as forecast:
        forecast.follow(model)
        verdict = forecast.note()[0]
    with_parts, without = (
        predict(
            QUICKSTART, [*LLAMA, "parallel.compile=false", "layout={tp: 2}", *more], hosts=(2,)
        ).memory.total
        for more in ([], ["parallel.sequence_parallel=false"])
    )
    assert with_parts < without
    assert verdict.startswith(f"memory: {bytes_text(without)} at the peak")


def test_a_run_whose_memory_is_not_known_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, cpu = loaded(1), torch.device("cpu")
    # a CPU has no memory of its own
    assert start.MemoryForecast(tmp_path, cpu, config, 0).note() == []
    monkeypatch.setenv(start.ROOM, "80")
    assert start.MemoryForecast(tmp_path, cpu, config, 1).note() == []  # another rank's
    monkeypatch.setattr(start, "PATIENCE_S", 0)
    with start.MemoryForecast(tmp_path, cpu, config, 0) as forecast:
        assert forecast.note() == []  # and the run goes on
    assert list(tmp_path.iterdir()) == []
