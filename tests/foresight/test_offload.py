"""What is foreseen of runs that offload (`parallel.offload`): the device's memory, the host's, and
time."""

from dataclasses import replace

import pytest

from meshtrain.cli.main import main
from meshtrain.cli.plan import make_plan, plan_text
from meshtrain.config import Config
from meshtrain.errors import InputError
from meshtrain.foresight import prediction
from meshtrain.foresight.blocks import _with_neighbours, _without_neighbours
from meshtrain.foresight.calibrate import phases
from meshtrain.foresight.draw import memory_of_ranks
from meshtrain.foresight.estimate import Estimates
from meshtrain.foresight.hardware import Hardware, Host, load
from meshtrain.foresight.offload import seconds_beside_update
from meshtrain.foresight.prediction import Prediction
from meshtrain.foresight.search import Search, forecast
from meshtrain.foresight.space import OFFLOAD, Space
from meshtrain.foresight.steptime import StepTime
from meshtrain.optim.host_states import in_buckets, most_on_device
from tests.foresight.traced import of_whole_step
from tests.launching import ROOT

QUICKSTART = str(ROOT / "configs/quickstart.yaml")
H100 = load("h100")
LAYERS = 8
TOKENS, D, F, KV = 8 * 2048, 2048, 5632, 1024
LARGE = (  # blocks as large as those of models that are trained, but few
    f"model.hidden_size={D}",
    f"model.intermediate_size={F}",
    f"model.num_hidden_layers={LAYERS}",
    "model.num_attention_heads=16",
    "model.num_key_value_heads=8",
    "data.seq_len=2048",
    "batch.micro_size=8",
    "batch.global_size=32",
    "train.precision=bfloat16",
    "parallel.compile=false",
)
OF_BLOCK = 2 * TOKENS * (6 * D + 2 * KV + 4 * F)  # bytes that all of its operators save


def loaded(*overrides: str) -> Config:
    return Config.load(QUICKSTART, [*LARGE, *overrides], world_size=2)


# overrides, and how far arithmetic over blocks may be from the whole trace
SELECTIVE, FULL = "parallel.recompute=selective", "parallel.recompute=full"
BY_BLOCKS = {
    "FSDP": (0.02, "layout={dp_shard: 2}", "parallel.offload=both"),
    "FSDP, full": (0.02, "layout={dp_shard: 2}", "parallel.offload=both", FULL),
    "FSDP, compiled": (
        0.04,
        "layout={dp_shard: 2}",
        "parallel.offload=both",
        "parallel.compile=true",
    ),
    "tp, selective": (0.02, "layout={tp: 2}", "parallel.offload=activations", SELECTIVE),
    # The last backward keeps what has come back for weight gradients, also of the block itself.
    "pp": (0.05, "layout={pp: 2}", "parallel.offload=both"),
    "pp, full": (0.02, "layout={pp: 2}", "parallel.offload=both", FULL),
}
QUICK = ("FSDP", "pp")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in BY_BLOCKS],
)
def test_memory_by_blocks_is_what_the_whole_step_takes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the host but for the rotary tables, which the first block of each stage sends for all."""
    tolerance, *overrides = BY_BLOCKS[name]
    config = loaded(*overrides)
    monkeypatch.setattr(prediction, "SHORT", 0)
    by_blocks = Prediction(config, exact=True).memory
    monkeypatch.setattr(prediction, "SHORT", 10**6)
    whole = of_whole_step(config, by_blocks)
    assert by_blocks.total == pytest.approx(whole.total, rel=tolerance), (by_blocks, whole)
    tables = 3 * 4 * TOKENS * D // 16
    assert by_blocks.host == pytest.approx(whole.host, abs=tables)


def test_what_leaves_the_device_is_on_the_host() -> None:
    none, optimizer, both = (
        Prediction(loaded("layout={dp_shard: 2}", f"parallel.offload={offload}")).memory
        for offload in ("none", "optimizer", "both")
    )
    states = none.resident["optimizer state"]
    assert none.host == 0
    assert "optimizer state" not in optimizer.resident
    assert optimizer.host == pytest.approx(states, rel=1e-3)
    assert none.total - optimizer.total == pytest.approx(states, rel=1e-3)
    assert both.host - optimizer.host == pytest.approx(LAYERS * OF_BLOCK, rel=0.02)
    stays = 2 * OF_BLOCK  # of the block that computes, and on its way
    freed = optimizer.parts["activations"] - both.parts["activations"]
    assert LAYERS * OF_BLOCK - stays < freed < LAYERS * OF_BLOCK


def test_a_block_is_traced_between_its_neighbours() -> None:
    first = (0, 1, 1, 1, 1, 1, 1, 1, 1, 9, 10)  # an embedding, layers, a norm and a head
    assert _with_neighbours(first) == [0, 1, 6, 6, 6, 6, 6, 7, 8, 9, 10]
    assert _without_neighbours(first) == (3, 4)
    alternating = (0, *(1, 2) * 10, 21)
    places = _with_neighbours(alternating)
    assert places[3:17:2] == [17] * 7
    assert places[4:18:2] == [16] * 7
    assert [places[i] for i in (1, 2, 18, 19, 20)] == [1, 16, 18, 19, 20]


def test_states_come_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshtrain.optim.host_states.BUCKET", 10)
    assert list(in_buckets([4, 6, 1, 20, 3])) == [range(2), range(2, 3), range(3, 4), range(4, 5)]
    assert list(in_buckets([])) == []
    # Of ten, two wait or are updated, and two leave.
    assert most_on_device([5] * 10, limit=10) == 20
    assert most_on_device([5, 5, 5], limit=10) == 15
    assert most_on_device([30, 5], limit=10) == 35


# Time ---------------------------------------------------------------------------------------------


def step_of(hardware: Hardware, *overrides: str) -> StepTime:
    return Prediction(loaded("layout={dp_shard: 2}", *overrides), hardware).step


def linked(bandwidth: float | None) -> Hardware:
    return replace(H100, host=Host(bandwidth=bandwidth))


def test_states_travel_beside_the_update() -> None:
    three_buckets = [[55e6] * 3]  # each takes 1 ms one way
    assert seconds_beside_update(three_buckets, 0.0, H100) == pytest.approx(0.004)
    assert seconds_beside_update(three_buckets, 0.0015, H100) == pytest.approx(0.003)
    assert seconds_beside_update(three_buckets, 1.0, H100) == pytest.approx(0.002)
    # A CPU copies, and does nothing else meanwhile.
    alone = replace(H100, compute=replace(H100.compute, asynchronous=False))
    assert seconds_beside_update(three_buckets, 1.0, alone) == pytest.approx(0.006)
    plain, offloaded = (step_of(H100, f"parallel.offload={how}") for how in ("none", "optimizer"))
    added = offloaded.parts["copies of optimizer states"]
    assert added > 0
    assert offloaded.seconds == pytest.approx(plain.seconds + added)
    # A run measures both as one.
    assert phases(offloaded)["update"] == pytest.approx(plain.parts["update"] + added)


def test_activations_hide_behind_blocks_that_take_longer() -> None:
    def added(link: float, recompute: str) -> float:
        keys = f"parallel.recompute={recompute}"
        plain, offloaded = (
            step_of(linked(link), keys, f"parallel.offload={how}")
            for how in ("none", "activations")
        )
        assert offloaded.spent["host"] == pytest.approx(offloaded.seconds - plain.seconds)
        return offloaded.seconds - plain.seconds

    assert added(55, "full") == pytest.approx(0, abs=1e-9)
    assert added(450, "none") == pytest.approx(0, abs=1e-9)  # NVLink-C2C
    assert 0 < added(110, "none") < added(55, "none")
    both_ways = 2 * 2 * LAYERS * OF_BLOCK  # of two microbatches
    assert added(1, "none") == pytest.approx(both_ways / 1e9, rel=0.1)


def test_without_the_rate_of_the_link_no_time_is_foreseen() -> None:
    assert step_of(linked(None)).seconds > 0
    for offload in ("optimizer", "activations"):
        with pytest.raises(InputError, match=r"has no host\.bandwidth, without which the time of"):
            step_of(linked(None), f"parallel.offload={offload}")


# For people, and searches -------------------------------------------------------------------------


def test_a_plan_names_what_lies_on_the_host() -> None:
    text = plan_text(make_plan(QUICKSTART, [*LARGE, "parallel.offload=both"], (2,)))
    assert "AdamW 1.4 GiB in the host's memory; activations come on top" in text
    config = loaded("parallel.offload=optimizer", "layout={dp_shard: 2}")
    config = replace(config, resolved=config.resolved.on_hosts((2,)))

    def line(gib: float | None) -> str:
        host = replace(H100.host, memory_gib=gib)
        foreseen = Prediction(config, replace(H100, host=host))
        foreseen.__dict__["saves"] = {}  # of other predictions
        [found] = [line for line in memory_of_ranks(foreseen) if "in the host's memory" in line]
        return found.strip()

    assert line(None) == "in the host's memory 1.4 GiB of a rank, at most 2.8 GiB of a host"
    assert line(4).endswith("; 3.6 GiB available: fits")
    assert line(2).endswith("; 1.8 GiB available: does not fit")


def test_a_search_that_does_not_vary_it_keeps_it() -> None:
    keys = "layout={dp_shard: 2}", "batch.micro_size=1", "parallel.offload=activations"
    config = loaded(*keys)
    search = Search(Space(config, ["parallel.recompute"]), forecast(config, H100))
    [first] = search.run(lambda overrides: loaded(*keys, *overrides), show=1)
    assert first.settings[OFFLOAD] == "activations"
    assert first.prediction.memory.host > 0


@pytest.mark.parametrize("offload", ["optimizer", "activations", "both"])
def test_estimates_are_near_predictions(offload: str) -> None:
    config = loaded("layout={dp_shard: 2}", "batch.micro_size=8")
    [candidate] = Space(config, []).candidates()
    estimate = Estimates(config, H100).of(candidate.changed({OFFLOAD: offload}), True)
    foreseen = Prediction(loaded("layout={dp_shard: 2}", f"parallel.offload={offload}"), H100)
    assert estimate.least_memory < foreseen.memory.total < estimate.most_memory
    assert 0.85 < estimate.seconds / foreseen.step.seconds < 1.05


def test_a_search_offloads_what_would_not_fit_otherwise() -> None:
    keys = "layout={dp_shard: 2}", "parallel.recompute=full", "batch.micro_size=1"
    config = loaded(*keys)
    needed = Prediction(config, H100).memory.total / 2**30

    def found(gib: float, hardware: Hardware = H100) -> list[str]:
        search = Search(Space(config, [OFFLOAD]), forecast(config, hardware, gib))
        results = search.run(lambda overrides: loaded(*keys, *overrides), show=1)
        return [candidate.settings[OFFLOAD] for candidate in results]

    assert found(1.4 * needed) == ["none"]
    assert found(0.9 * needed) == ["optimizer"]
    assert found(0.1) == []
    little = replace(H100, host=replace(H100.host, memory_gib=0.1))
    assert found(0.9 * needed, little) == []


def test_a_search_offloads_only_where_nothing_fits_without(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Unless it is told not to."""
    keys = *LARGE, "layout={dp_shard: 2}", "parallel.recompute=full"
    needed = Prediction(loaded(*keys[len(LARGE) :]), H100).memory.total / 2**30

    def printed(gib: float, keep: str = "") -> str:
        words = ["--hosts", "2", "--gpu", "h100", "--max-memory", f"{gib}"]
        words += ["--keep", f"layout.dp_shard=2,micro_size,recompute,reshard_after_forward{keep}"]
        main(["search", QUICKSTART, *keys, *words])
        captured = capsys.readouterr()
        return captured.out + captured.err

    assert "parallel.offload" not in printed(1.1 * needed)
    needs = printed(0.8 * needed)
    assert "without parallel.offload nothing fits" in needs
    assert "parallel.offload=optimizer" in needs
    assert "no layout of these hosts is found" in printed(0.8 * needed, ",offload")
