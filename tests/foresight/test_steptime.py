"""Seconds of a step from plain values: hardware, collectives, and blocks whose work is written by
hand."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshtrain.config.errors import ConfigErrors
from meshtrain.config.schema import OptimizerSection, ParamGroupSection
from meshtrain.errors import InputError
from meshtrain.foresight import steptime
from meshtrain.foresight.collective import Group, seconds
from meshtrain.foresight.hardware import Hardware, load
from meshtrain.foresight.steptime import StepPlan
from meshtrain.foresight.work import Parameter, Pass, Product, Send, Work
from meshtrain.layout import Layout
from meshtrain.optim.groups import update_bytes, update_flops
from meshtrain.parallel.fsdp import MIN_UNIT_SIZE
from meshtrain.parallel.sharding import ParameterSpec
from meshtrain.pipeline.actions import Schedule
from meshtrain.pipeline.schedule import NAMES, build
from meshtrain.pipeline.simulate import simulate

H100 = load("h100")


def block(scale: int = 1, sends: tuple[Send, ...] = ()) -> Work:
    forward = Pass((Product(8192, 4096, 4096, scale),), 1e11, 4e8 * scale, 20, sends)
    return Work(
        "block",
        (Parameter("block.weight", (2 * 10**8 * scale,)),),
        forward,
        forward,
        replace(forward, attention_flops=0),
    )


def step_of(
    works: Sequence[Work],
    layout: Layout,
    schedule: Schedule | None = None,
    hardware: Hardware = H100,
    **options: Any,
) -> steptime.StepTime:
    plan = StepPlan(layout=layout, schedule=schedule, **options)
    return steptime.step_time(works, plan, hardware)


def test_built_in_hardware() -> None:
    for name in ("a100", "h100", "h200", "b200", "l40s", "cpu"):
        hardware = load(name)
        assert 0 < hardware.device.room < hardware.device.memory_gib * 2**30
        assert hardware.flops("bfloat16") > 0
        assert hardware.between_hosts.bandwidth < hardware.within_host.bandwidth


def test_what_is_wrong_with_a_hardware_file_is_said_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "device: {name: mine, memory_gb: 80}\ncompute: {peak: {bfloat16: 989}, hbm: -1}\n"
    )
    with pytest.raises(ConfigErrors) as raised:
        load(str(path))
    for part in (
        f"{path}:1",
        "did you mean memory_gib?",
        f"{path}:2",
        "hardware.within_host is missing",
    ):
        assert part in str(raised.value)
    good = "device: {name: m, memory_gib: 8}\ncompute: {peak: {bfloat16: -1}, hbm: 1}\n"
    path.write_text(
        good
        + "within_host: {bandwidth: 1, latency: 0}\nbetween_hosts: {bandwidth: 1, latency: 0}\n"
    )
    with pytest.raises(InputError, match=r"peak\.bfloat16"):
        load(str(path))
    with pytest.raises(InputError, match="a100, b200, cpu, h100"):
        load("h1000")
    with pytest.raises(InputError, match="no peak for float4"):
        H100.flops("float4")


def test_groups_know_who_shares_a_host() -> None:
    layout = Layout({"dp_shard": 8, "tp": 2}).on_hosts([8, 8])
    assert Group.of(layout, "tp") == Group(2, 2)
    assert Group.of(layout, "dp_shard") == Group(8, 4)
    assert Group.of(Layout({"dp_shard": 8, "tp": 2}), "dp_shard") == Group(8, 8)


def test_a_collective_takes_its_bytes_and_its_steps() -> None:
    inside, outside = H100.within_host, H100.between_hosts
    assert seconds("all_gather", 1e9, Group(1, 1), H100) == 0
    assert seconds("all_gather", 0, Group(8, 8), H100) == 7 * inside.latency
    assert seconds("all_reduce", 0, Group(8, 8), H100) == 14 * inside.latency
    large = 1e12
    assert seconds("all_gather", large, Group(8, 8), H100) == pytest.approx(
        large / (inside.bandwidth * 1e9), rel=1e-3
    )
    for on_host in (1, 2, 4):  # each rank of a host brings an interface
        expected = large / (on_host * outside.bandwidth * 1e9)
        assert seconds("all_reduce", large, Group(16, on_host), H100) == pytest.approx(
            expected, rel=1e-3
        )
    assert seconds("all_to_all", large, Group(16, 8), H100) < seconds(
        "all_to_all", large, Group(16, 1), H100
    )
    assert seconds("p2p", large, Group(2, 1), H100) > seconds("p2p", large, Group(2, 2), H100)


def test_one_process_is_its_products_and_traffic_or_its_launches() -> None:
    layout, work = Layout({"dp_shard": 1}), block()
    step = step_of([work, work], layout, microbatches=3, tokens=100, flops=1e12)
    one = steptime.cost(work.forward, layout, H100, "bfloat16")
    rate = 989e12 * H100.compute.matmul
    assert one["products"] == pytest.approx(2 * 8192 * 4096**2 * (1 + 100 / 4096) / rate)
    assert one["traffic"] == pytest.approx(4e8 / (3350e9 * 0.8))
    assert step.parts["forward"] == pytest.approx(6 * one.total())
    assert set(step.parts) == {"forward", "backward", "update"}
    assert step.seconds == pytest.approx(sum(step.parts.values()))
    assert step.tokens_per_s == pytest.approx(100 / step.seconds)
    assert step.mfu == pytest.approx(1e12 / step.seconds / 989e12)
    slow = replace(H100, compute=replace(H100.compute, launch=1.0))
    launched = steptime.cost(work.forward, layout, slow, "bfloat16")
    assert launched.total() == pytest.approx(20)
    assert step_of([work], layout, hardware=slow).limit.startswith("kernel")


@pytest.mark.parametrize("name", NAMES)
def test_the_bubble_is_that_of_the_simulated_schedule(name: str) -> None:
    schedule = build(name, ranks=2, microbatches=8)
    works = [block(1 + (i == 2)) for i in range(schedule.stages)]
    layout = Layout({"pp": 2})
    costs = steptime.block_costs(works, layout, H100, "bfloat16")
    timeline = simulate(schedule, *zip(*(cost.passes for cost in costs), strict=True))
    free = replace(H100, within_host=replace(H100.within_host, latency=0, message=0))
    bounds = [(i, i + 1) for i in range(schedule.stages)]
    step = step_of(works, layout, schedule, free, bounds=bounds)
    assert step.seconds - step.parts["update"] == pytest.approx(timeline.makespan)
    assert step.parts.get("idle of pp", 0) == pytest.approx(min(timeline.idle))


def test_long_schedules_are_extrapolated_from_their_steady_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    schedule = build("1f1b", ranks=4, microbatches=64)
    works, bounds = [block(1 + i) for i in range(4)], [(i, i + 1) for i in range(4)]

    def step_seconds() -> float:
        return step_of(works, Layout({"pp": 4}), schedule, bounds=bounds, handed_on=1e6).seconds

    exact = step_seconds()
    monkeypatch.setattr(steptime, "MOST_ACTIONS", 100)
    assert step_seconds() == pytest.approx(exact, rel=1e-9)


def test_messages_hide_beside_what_computes() -> None:
    # what is ahead: the first waits
    assert steptime.one_behind_the_other([1, 1, 1], [2, 2, 2]) == 7
    assert steptime.one_behind_the_other([3, 3], [1, 1]) == 7
    # what is behind: the last goes on
    assert steptime.one_behind_the_other([2, 2, 2], [1, 1, 1]) == 7
    assert steptime.one_behind_the_other([1, 1], [3, 3]) == 7


def test_what_a_layout_sends_is_seen_or_hidden() -> None:
    works, layout = [block(), block()], Layout({"dp_shard": 8}).on_hosts([4, 4])
    ddp = step_of(works, Layout({"dp_replicate": 8}).on_hosts([8]), microbatches=4)
    frees = step_of(works, layout, microbatches=4, gathers_again=True)
    keeps = step_of(works, layout, microbatches=4, gathers_again=False)
    with_tp = step_of([block(1, (Send("tp", "all_gather", 1e9),))], Layout({"tp": 8}).on_hosts([8]))

    def whole(step: steptime.StepTime, axis: str = "dp_shard") -> float:
        return step.parts[axis] + step.hidden.get(axis, 0)

    sums = seconds("all_reduce", 2 * 7 / 8 * 4 * 2e8, Group(8, 8), H100)
    gather = seconds("all_gather", 7 / 8 * 2 * 2e8, Group(8, 4), H100)
    scatter = seconds("reduce_scatter", 7 / 8 * 4 * 2e8, Group(8, 4), H100)
    assert whole(ddp, "dp_replicate") == pytest.approx(2 * sums)
    assert whole(keeps) == pytest.approx(2 * gather + 2 * scatter)
    # the last block stays between its passes
    assert whole(frees) == pytest.approx(4 * (3 * gather + 2 * scatter))
    assert keeps.sent == {"dp_shard": pytest.approx(7 / 8 * 2e8 * (2 * 2 + 2 * 4))}
    assert frees.sent == {"dp_shard": pytest.approx(7 / 8 * 2e8 * 4 * (3 * 2 + 2 * 4))}
    assert ddp.sent == {"dp_replicate": pytest.approx(2 * 7 / 8 * 4 * 4e8)}
    assert with_tp.parts["tp"] == pytest.approx(3 * seconds("all_gather", 1e9, Group(8, 8), H100))


def test_copies_that_share_the_optimizer_update_less_and_gather_it() -> None:
    """A ring's sum is a scatter and a gather: the same bytes, but the gather hides beside
    nothing."""
    works, layout = [block(), block()], Layout({"dp_replicate": 8}).on_hosts([8])
    each = step_of(works, layout)
    shared = step_of(works, layout, shards_optimizer=True)
    assert shared.parts["update"] == pytest.approx(each.parts["update"] / 8)
    assert shared.sent == {"dp_replicate": pytest.approx(each.sent["dp_replicate"])}
    gather = seconds("all_gather", 7 / 8 * 4 * 4e8, Group(8, 8), H100)
    assert gather < shared.parts["dp_replicate"] < each.parts["dp_replicate"] + gather


def test_the_update_takes_what_its_optimizer_does() -> None:
    """Its bytes by the rule, on the ranks that hold them; Muon's products are shared by the ranks
    of a stage, copies included."""
    shape = (4096, 1024)
    matrices = (Parameter("layers.0.up.weight", shape), Parameter("layers.0.norm.weight", (1024,)))
    frozen = Parameter("layers.0.down.weight", shape, trained=False)
    work = replace(block(), parameters=(*matrices, frozen))
    layout = Layout({"pp": 2, "dp_replicate": 2, "dp_shard": 4}).on_hosts([8, 8])
    one_stage = {"schedule": build("1f1b", ranks=2, microbatches=2), "bounds": [(0, 1), (1, 2)]}

    def update(**keys: Any) -> float:
        step = step_of([work, work], layout, optimizer=OptimizerSection(**keys), **one_stage)
        return step.parts["update"]

    def moved(**keys: Any) -> float:
        specs = [ParameterSpec(parameter.name, parameter.shape) for parameter in matrices]
        nbytes = sum(update_bytes(OptimizerSection(**keys), spec, 4) for spec in specs)
        return nbytes / 4 / (3350e9 * 0.8)

    adamw = update()
    others = (
        {"name": "sgd"},
        {"state_precision": "bfloat16"},
        {"ema_decay": 0.999},
        {"groups": (ParamGroupSection(match="*up*", name="sgd"),)},
    )
    assert adamw == pytest.approx(moved())
    for keys in others:
        assert update(**keys) == pytest.approx(moved(**keys))
        assert update(**keys) != pytest.approx(adamw)
    flops = update_flops(OptimizerSection(name="muon"), ParameterSpec("layers.0.up.weight", shape))
    assert flops > 0
    products = flops / 8 / (989e12 * H100.compute.matmul)
    assert update(name="muon") == pytest.approx(moved(name="muon") + products)


def test_small_blocks_are_gathered_with_the_next_ones() -> None:
    a, b, c = MIN_UNIT_SIZE // 2, MIN_UNIT_SIZE, 3 * MIN_UNIT_SIZE
    assert steptime.gathers_of_units([a, b, c, b, a], [a, b, c, b, a]) == (
        [2 * a + b, 0, c, b, 0],
        [0, a + b, c, 0, 0],
    )
    assert steptime.gathers_of_units([5, 6], [5, 6]) == ([11, 0], [0, 0])


def faster(hardware: Hardware, factor: float) -> list[Hardware]:
    """In one thing each."""
    compute, links = (
        hardware.compute,
        {key: getattr(hardware, key) for key in ("within_host", "between_hosts")},
    )
    return [
        replace(
            hardware,
            compute=replace(
                compute, peak={key: rate * factor for key, rate in compute.peak.items()}
            ),
        ),
        replace(hardware, compute=replace(compute, hbm=compute.hbm * factor)),
        replace(hardware, compute=replace(compute, launch=compute.launch / factor)),
        replace(
            hardware,
            **{
                key: replace(link, bandwidth=link.bandwidth * factor) for key, link in links.items()
            },
        ),
        replace(
            hardware,
            **{key: replace(link, latency=link.latency / factor) for key, link in links.items()},
        ),
    ]


@pytest.mark.parametrize("seed", range(12))
def test_no_faster_hardware_makes_a_step_slower_and_parts_sum_to_the_step(seed: int) -> None:
    draw = random.Random(seed)
    pp, dp, shard, tp = (draw.choice([1, 2]) for _ in range(4))
    layout = Layout({"pp": pp, "dp_replicate": dp, "dp_shard": shard, "tp": tp})
    layout = layout.on_hosts(
        [layout.world_size] if draw.random() < 0.5 else [1] * layout.world_size
    )
    schedule = build("1f1b", ranks=pp, microbatches=4) if pp > 1 else None
    sends = (
        Send(
            "tp", draw.choice(["all_gather", "all_to_all", "all_reduce"]), 10 ** draw.uniform(3, 9)
        ),
    )
    works = [block(draw.randint(1, 9), sends) for _ in range(2 * pp)]
    options = {
        "bounds": [(2 * i, 2 * i + 2) for i in range(pp)],
        "handed_on": 1e8,
        "gathers_again": pp == 1,
    }

    def step(hardware: Hardware) -> steptime.StepTime:
        return step_of(works, layout, schedule, hardware, microbatches=4, **options)

    before = step(H100)
    assert before.seconds == pytest.approx(sum(before.parts.values()))
    assert all(part > 0 for part in before.parts.values())
    assert before.limit
    for hardware in faster(H100, 10 ** draw.uniform(0, 3)):
        assert step(hardware).seconds <= before.seconds * (1 + 1e-12)


def test_what_another_framework_has_published() -> None:
    """Megatron-LM's 145.6 billion parameters on 1,536 A100, written by hand: 148 TFLOP/s of each,
    what is recomputed counted (Narayanan et al., https://arxiv.org/abs/2104.04473, table 1)."""
    hidden, layers, s, tp, words = 12288, 80, 2048, 8, 51200
    heads, width = 96 // tp, 128
    products = tuple(
        Product(s, n, k) for n, k in ((3 * hidden // tp, hidden), (hidden, hidden // tp),
                                      (4 * hidden // tp, hidden), (hidden, 4 * hidden // tp))
    )  # fmt: skip
    # attention was not fused then
    scores = (
        Product(s, s, width, heads),
        Product(s, width, s, heads),
    )
    moved = 2.0 * (8 * heads * s * s + 20 * s * hidden)
    sends = (Send("tp", "all_reduce", 2 * 2 * (tp - 1) / tp * 2 * s * hidden),)  # two of them
    forward = Pass((*products, *scores), 0, moved, 40, sends)
    again = Pass(
        (*products, *scores, *products, *scores, *scores), 0, 3 * moved, 100, (*sends, *sends)
    )
    weights = (Parameter("layer.weight", (12 * hidden**2 // tp,)),)
    layer = Work("layer", weights, forward, again, Pass(products, operators=4))
    ends = Pass((Product(s, words // tp, hidden),), 0, 6.0 * s * words // tp, 20)
    words_of_rank = (Parameter("head.weight", (words // tp, hidden)),)
    head = Work("head", words_of_rank, ends, ends, ends)
    layout = Layout({"pp": 8, "dp_replicate": 24, "tp": tp}).on_hosts([8] * 192)
    schedule = build("1f1b", ranks=8, microbatches=2304 // 24)
    bounds = [(i * layers // 8, (i + 1) * layers // 8 + (i == 7)) for i in range(8)]
    step = step_of(
        [*[layer] * layers, head],
        layout,
        schedule,
        load("a100"),
        bounds=bounds,
        handed_on=2 * s * hidden / tp,
    )
    flops = (
        96 * 2304 * s * layers * hidden**2 * (1 + s / (6 * hidden) + words / (16 * layers * hidden))
    )
    assert flops / step.seconds / 1536 / 1e12 == pytest.approx(148, rel=0.2)
