"""The search for a layout: it finds what trying everything finds, and what it finds trains."""

import itertools
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest

from meshtrain.config import Config, ConfigErrors
from meshtrain.data.order import microbatches
from meshtrain.errors import InputError
from meshtrain.foresight import blocks
from meshtrain.foresight.estimate import Estimate, Estimates
from meshtrain.foresight.hardware import load
from meshtrain.foresight.pipelines import waits
from meshtrain.foresight.prediction import SAVINGS, Prediction
from meshtrain.foresight.schedules import held_by_ranks
from meshtrain.foresight.search import NEAR, Forecast, Search, forecast
from meshtrain.foresight.space import (
    COMPILE,
    KEYS,
    MICRO,
    OFFLOAD,
    SCHEDULE,
    SEQUENCE,
    STAGES,
    Candidate,
    Space,
)
from meshtrain.layout import AXES, DATA_AXES, Layout
from meshtrain.pipeline.schedule import NAMES, build
from meshtrain.pipeline.simulate import simulate

SMALL = str(Path(__file__).with_name("small.yaml"))
# large enough that kernels take longer than their launches
LARGER = (
    "model.hidden_size=1024",
    "model.intermediate_size=4096",
    "model.num_attention_heads=8",
    "model.num_key_value_heads=8",
    "model.num_hidden_layers=14",
    "data.seq_len=2048",
    "train.precision=bfloat16",
    "parallel.compile=false",
)
ON_DEVICE = tuple(key for key in SAVINGS if key != OFFLOAD)
SLOWER = {"none": 1.0, "selective": 1.1, "full": 1.3}
KEPT = {"none": 4, "selective": 2, "full": 1}
STATES = {"none": 1.0, "optimizer": 0.6, "both": 0.6}  # of the memory for weights
SAVED = {"none": 1.0, "optimizer": 1.0, "both": 0.5}  # of the memory for activations
COPIED = {"none": 1.0, "optimizer": 1.03, "both": 1.2}


def stand_in(memory: float = math.inf) -> Forecast:
    """A machine of a few terms: kernels that are launched, messages, a pipeline that fills; quick.
    What it estimates is a bound of what it predicts."""

    def work(config: Config) -> float:
        layout, parallel, micro_size = config.resolved, config.parallel, config.batch.micro_size
        count = microbatches(24, micro_size, layout.size(*DATA_AXES))
        kernels = count * max(micro_size / layout.size("tp", "cp"), 0.3) / layout.size("pp")
        sent = (
            0.01
            * layout.size("tp", "cp")
            * (1.5 if parallel.context == "ring" else 1)
            / layout.context_heads
        )
        slower = SLOWER[parallel.recompute] * (1.02 if parallel.regather else 1.0)
        return kernels * slower * COPIED[parallel.offload] + sent

    def filled(config: Config) -> float:
        stages = config.pipeline.stages_per_rank or 1
        return work(config) * (1 + 0.1 * (config.resolved.size("pp") - 1) / stages)

    def memory_of(config: Config) -> float:
        layout, parallel = config.resolved, config.parallel
        shards = layout.size("dp_shard", "cp")
        weights = STATES[parallel.offload] * 40 / layout.size("pp", "tp") / shards
        kept = KEPT[parallel.recompute] * config.batch.micro_size - 0.2 * parallel.regather
        kept *= SAVED[parallel.offload]
        gathered = 4 * (not parallel.reshard_after_forward) * (shards > 1)
        return weights + kept / layout.size("tp", "cp") + gathered

    base = load_small(16, "layout={dp_shard: -1}")

    def estimate(candidate: Candidate, scheduled: bool) -> Estimate:
        config = candidate.apply(base)
        total = memory_of(config)
        seconds = filled(config) if scheduled else work(config)
        return Estimate(seconds, 0.9 * total, 1.1 * total)

    def predict(config: Config) -> Any:
        layout = config.resolved
        parts = {
            "blocks": filled(config),
            "dp_shard": 0.02
            * (layout.size("dp_shard", "cp") > 1)
            * (1 + config.parallel.reshard_after_forward),
            "dp_replicate": 0.03 * (layout.size("dp_replicate") > 1),
            "schedule": 0.001 * len(config.pipeline.schedule),
        }
        return SimpleNamespace(
            config=config,
            step=SimpleNamespace(seconds=sum(parts.values()), parts=parts),
            memory=SimpleNamespace(total=memory_of(config)),
            fits_hosts=True,
        )

    return Forecast(estimate, predict, memory, margin=0.0)


def space(
    world: int, vary: tuple[str, ...] = KEYS, hosts: tuple[int, ...] = (), **fixed: int
) -> Space:
    return space_of(load_small(world, "layout={dp_shard: -1}"), vary, hosts, **fixed)


def space_of(
    config: Config, vary: tuple[str, ...], hosts: tuple[int, ...] = (), **fixed: int
) -> Space:
    layout = config.resolved
    return Space(
        replace(config, resolved=layout.on_hosts(hosts or (layout.world_size,))), vary, fixed
    )


def load_small(world: int, *overrides: str) -> Config:
    return Config.load(SMALL, overrides, world_size=world)


def run(search: Search, world: int, **options: Any) -> list[Candidate]:
    """What a search shows when it reads each layout as a run of so many processes does."""
    return search.run(lambda overrides: load_small(world, *overrides), **options)


def every_candidate(searched: Space) -> list[Candidate]:
    return [candidate for first in searched.candidates() for candidate in searched.schedules(first)]


def test_a_schedule_of_a_file_is_tried_where_it_fits(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1")
    keys = f"pipeline.schedule={file}", "batch.micro_size=4", "batch.global_size=8"
    config = load_small(2, *keys, "layout={dp_shard: 2}")
    accepted = every_candidate(space_of(config, ("layout", "batch.micro_size")))
    assert {(candidate.layout.size("pp"), candidate.parts[0]) for candidate in accepted} == {
        (1, 1),
        (2, 2),
    }
    # 2 microbatches
    assert {c.settings["batch.micro_size"] for c in accepted if c.layout.size("pp") == 2} == {4}


def test_a_layout_that_stays() -> None:
    candidates = space(2, ("batch.micro_size",)).candidates()
    assert len({candidate.settings["batch.micro_size"] for candidate in candidates}) > 1


def test_layouts_are_those_that_the_config_takes() -> None:
    """Each layout of 16 processes, read as training reads it: taken or refused by both."""
    accepted = {candidate.layout.shape for candidate in every_candidate(space(16, ("layout",)))}
    taken, refused = set(), 0
    for sizes in itertools.product((1, 2, 4, 8, 16), repeat=len(AXES)):
        if math.prod(sizes) != 16:
            continue
        layout = ", ".join(f"{axis}: {n}" for axis, n in zip(AXES, sizes, strict=True))
        try:
            taken.add(load_small(16, f"layout={{{layout}}}").resolved.shape)
        except ConfigErrors:
            refused += 1
    assert accepted == taken
    assert taken
    assert refused


def test_candidates_train() -> None:
    """A sample of all candidates, with every key: what the overrides make is what was searched."""
    searched = space(16)
    every = every_candidate(searched)
    sample = every[:: len(every) // 25]
    saved = [list(searched.savings(candidate))[-1] for candidate in sample[::3]]
    for candidate in [*sample, *saved]:
        loaded, applied = (
            load_small(16, *candidate.overrides(searched.config)),
            candidate.apply(searched.config),
        )
        for name in ("parallel", "pipeline", "batch"):
            assert getattr(loaded, name) == getattr(applied, name)
        assert loaded.resolved.context_heads == applied.resolved.context_heads
        assert all(loaded.resolved.size(axis) == applied.resolved.size(axis) for axis in AXES)


def brute_force(searched: Space, forecast: Forecast) -> list[tuple[float, Candidate]]:
    """Everything that fits, each candidate predicted: of those that differ in SAVINGS only the
    fastest."""
    groups: dict[tuple[Any, ...], tuple[float, Candidate]] = {}
    for candidate in every_candidate(searched):
        for other in searched.savings(candidate):
            prediction = forecast.predict(other.apply(searched.config))
            if prediction.memory.total <= forecast.memory:
                pair, key = (prediction.step.seconds, other), other.key(*SAVINGS)
                groups[key] = min(pair, groups.get(key, pair), key=lambda pair: pair[0])
    return sorted(groups.values(), key=lambda pair: pair[0])


@pytest.mark.parametrize("memory", [math.inf, 9.0, 5.0, 3.6])
def test_it_finds_what_trying_everything_finds(memory: float) -> None:
    """The first is the simplest of the fastest; the others are the fastest layouts, in this
    order."""
    fixed = {COMPILE, SEQUENCE} if memory < 5 else {COMPILE, SEQUENCE, OFFLOAD}
    vary = tuple(key for key in KEYS if key not in fixed)
    searched, forecast = space(16, vary), stand_in(memory)
    every = brute_force(searched, forecast)
    search = Search(searched, forecast)
    shown = run(search, 16, show=30)
    near = [candidate for seconds, candidate in every if seconds <= every[0][0] * (1 + NEAR)]

    def simple(candidate: Candidate) -> tuple[float, ...]:
        return *candidate.parts, forecast.predict(candidate.apply(searched.config)).memory.total

    assert simple(shown[0]) == min(map(simple, near))
    few = run(Search(space(16, vary), forecast), 16, show=2)  # ends as early as it may
    assert simple(few[0]) == simple(shown[0])
    fastest = {candidate.layout.shape: seconds for seconds, candidate in reversed(every)}
    assert min(candidate.prediction.step.seconds for candidate in shown) == pytest.approx(
        every[0][0]
    )
    assert len(shown) == min(30, len(fastest))
    assert search.predicted < len(every) / 3 or memory < math.inf


def test_the_least_memory_of_the_fastest() -> None:
    searched, forecast = space(16, ("layout", MICRO, *ON_DEVICE)), stand_in()
    [first, *_] = run(Search(searched, forecast, "memory"), 16, error=4)
    best = brute_force(searched, forecast)[0][0]
    leanest = math.inf
    for candidate in searched.candidates():
        for values in itertools.product(*(SAVINGS[key] for key in ON_DEVICE)):
            saved = candidate.changed(dict(zip(ON_DEVICE, values, strict=True)))
            prediction = forecast.predict(saved.apply(searched.config))
            if prediction.step.seconds <= best * 5:
                leanest = min(leanest, prediction.memory.total)
    assert first.prediction.memory.total == leanest
    assert first.prediction.step.seconds <= best * 5


@pytest.mark.parametrize("limit", [7, math.inf])
def test_each_candidate_is_shown_or_has_one_reason(limit: float) -> None:
    searched = space(16, ("layout", MICRO, SCHEDULE, *ON_DEVICE))
    search = Search(searched, stand_in(4.0))
    shown = run(search, 16, show=2, limit=limit)
    counts = {reason: count for reason, (count, _) in searched.rejected.items()}
    reasons = {
        "more ranks of pp than blocks",
        "tp that the model does not take",
        "do not fit",
        "slower than these, or less simple",
        "slower than these, by an estimate" if limit == math.inf else "not predicted: --limit",
    }
    assert counts.keys() == reasons
    assert sum(counts.values()) + len(shown) == searched.count
    assert search.predicted <= limit
    assert [bool(candidate.reason) for candidate in shown] == [False, True]


def test_the_first_results_are_there_before_anything_is_predicted() -> None:
    seen = []

    def watch(search: Search) -> None:
        if search.is_ranked and not seen:
            seen.append((search.predicted, search.first_results()))

    shown = run(Search(space(16, ("layout",)), stand_in()), 16, watch=watch)
    [(predicted, first)] = seen
    assert predicted == 0
    assert len(first) == len(shown)
    assert all(candidate.estimate.seconds > 0 for candidate in first)


@pytest.mark.parametrize("hosts", [(8, 4), (4, 8), (6, 6)])
def test_tp_stays_within_hosts_of_any_size(hosts: tuple[int, ...]) -> None:
    searched = space(12, ("layout",), hosts)
    for candidate in searched.candidates():
        layout = candidate.layout
        assert not any(layout.crosses_hosts(group) for group in layout.groups("tp"))
    assert any("more than a host" in reason for reason in searched.rejected)


def test_sequences_are_not_cut_into_crumbs_over_hosts() -> None:
    """Of 32 tokens over hosts of 2: unless it is asked for."""
    layouts = {first.layout.size("cp") for first in space(16, ("layout",), (2,) * 8).candidates()}
    assert layouts == {1, 2}
    assert {
        first.layout.size("cp") for first in space(16, ("layout",), (2,) * 8, cp=8).candidates()
    } == {8}


def test_what_is_kept_and_what_is_refused_as_a_whole() -> None:
    shown = run(Search(space(8, ("layout",), tp=4), stand_in()), 8)
    assert {(candidate.layout.size("tp"), candidate.settings[MICRO]) for candidate in shown} == {
        (4, 4)
    }
    with pytest.raises(InputError, match=r"--keep: {tp: 3} does not divide the 8 processes"):
        run(Search(space(8, ("layout",), tp=3), stand_in()), 8)
    searched = space(8, ("layout",))
    assert not run(Search(searched, stand_in()), 9)
    assert "start 8" in searched.rejected["refused when it is read as a whole"][1]


@pytest.mark.parametrize("name", NAMES)
def test_what_schedules_wait_and_hold_follows_from_small_pipelines(name: str) -> None:
    """Of 8 ranks, from 2 and 6: within a microbatch or two of what the schedule itself does."""
    ranks, count = 8, 32
    schedule = build(name, ranks=ranks, microbatches=count)
    idle, held = waits(name, ranks, schedule.stages_per_rank, count)
    third = 1 / (3 * schedule.stages_per_rank)
    costs = [third] * schedule.stages
    takes = simulate(schedule, costs, costs, costs).makespan
    assert count + idle == pytest.approx(takes, abs=1.5)
    most = max(
        sum(stage.forwards + stage.backwards for stage in case)
        for of_rank in held_by_ranks(schedule)
        for case in of_rank
    )
    assert held == pytest.approx(most / schedule.stages_per_rank, abs=1.5)


@pytest.mark.slow
def test_estimates_are_near_predictions() -> None:
    """Of layouts of a small Llama with every axis and schedule."""
    hardware = load("h100")
    searched = space_of(
        load_small(16, *LARGER, "layout={dp_shard: -1}"), ("layout", SCHEDULE, *ON_DEVICE), (8, 8)
    )
    estimates = Estimates(searched.config, hardware)
    every = [saved for first in every_candidate(searched) for saved in searched.savings(first)]
    ratios = []
    for candidate in every[:: len(every) // 9]:
        config = candidate.apply(searched.config)
        estimate, prediction = estimates.of(candidate, True), Prediction(config, hardware)
        ratios.append(estimate.seconds / prediction.step.seconds)
        assert estimate.least_memory <= prediction.memory.total
    assert 0.85 <= median(ratios) <= 1.05
    assert max(ratios) <= 1.2


def test_without_a_schedule_a_pipeline_is_estimated_as_with_the_best_one() -> None:
    """No higher, so that a search finds it, and not much lower, so that a table tells something."""
    searched = space_of(
        load_small(16, *LARGER, "layout={dp_shard: -1}"), ("layout", SCHEDULE, STAGES), (8, 8)
    )
    estimates = Estimates(searched.config, load("h100"))
    pipelines = [first for first in searched.candidates() if first.layout.size("pp") > 1]
    assert len(pipelines) > 10
    for first in pipelines:
        least = estimates.of(first, False)
        scheduled = [estimates.of(other, True) for other in searched.schedules(first)]
        fastest = min(estimate.seconds for estimate in scheduled)
        assert 0.95 * fastest <= least.seconds <= fastest * (1 + 1e-9)
        leanest = min(estimate.least_memory for estimate in scheduled)
        assert 0.7 * leanest <= least.least_memory <= leanest * (1 + 1e-9)


def test_the_work_of_a_search_does_not_grow_with_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `tp` and `cp` alone, a thousand times as many ranks: as many traces, and no list of
    ranks."""
    ranks, traces = Counter[int](), Counter[int]()
    offsets, counted = Layout._offsets, blocks._counted
    for world in (32, 32768):
        searched = space(world, ("layout", SCHEDULE), (8,) * (world // 8), tp=1, cp=1)

        def listed(*args: Any, world: int = world) -> list[int]:
            ranks[world] += len(members := offsets(*args))
            return members

        def traced(*args: Any, world: int = world) -> Any:
            traces[world] += 1
            return counted(*args)

        monkeypatch.setattr(Layout, "_offsets", listed)
        monkeypatch.setattr(blocks, "_counted", traced)
        monkeypatch.setattr(blocks, "_known", {})
        search = Search(searched, forecast(searched.config, load("h100")))
        assert run(search, world, show=1, limit=20)
    assert 0 < traces[32768] <= traces[32]
    assert ranks[32768] < 32768
