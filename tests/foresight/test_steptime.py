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
from meshtrain.foresight.collective import Group, bandwidth, seconds
from meshtrain.foresight.hardware import Hardware, load, with_fabric
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
        assert hardware.between_hosts.of_rank() < hardware.within_host.of_rank()
    for name in ("efa", "ethernet", "infiniband"):
        assert with_fabric(H100, name).between_hosts.of_rank(2, 8) <= 50


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
    with pytest.raises(InputError, match=r"did you mean h100\? .* a100, b200, cpu, h100"):
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
    call = inside.message
    assert seconds("all_gather", 1e9, Group(1, 1), H100) == 0
    assert seconds("all_gather", 0, Group(8, 8), H100) == call + 7 * inside.latency
    assert seconds("all_gather", 0, Group(8, 8), H100, times=3) == pytest.approx(
        3 * (call + 7 * inside.latency)
    )
    assert seconds("all_reduce", 0, Group(8, 8), H100) == call + 14 * inside.latency
    # A ring passes all hosts, a tree has a step for each doubling of them.
    assert seconds("all_gather", 0, Group(512, 8), H100) == pytest.approx(
        outside.message + 64 * 7 * inside.latency + 63 * outside.latency
    )
    assert seconds("all_reduce", 0, Group(512, 8), H100) == pytest.approx(
        outside.message + 2 * (7 * inside.latency + 6 * outside.latency)
    )
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


def test_a_table_has_the_bandwidth_of_so_many_hosts() -> None:
    """Of all their ranks together, of which a smaller group has its share."""
    table = replace(H100.between_hosts, bandwidth={2: 320, 8: 80})
    cluster = replace(H100, between_hosts=table)
    layout = Layout({"dp_replicate": 2, "dp_shard": 64}).on_hosts([8] * 16)

    def rate(kind: str, group: Group) -> float:
        return bandwidth(kind, group, cluster)

    assert rate("all_gather", Group(16, 8)) == pytest.approx(320)
    assert rate("all_gather", Group(32, 8)) == pytest.approx(160)  # between two entries
    assert rate("all_gather", Group.of(layout, "dp_shard")) == pytest.approx(80)
    assert rate("all_gather", Group(512, 8)) == pytest.approx(80)  # beyond the last
    assert rate("all_reduce", Group.of(layout, "dp_replicate")) == pytest.approx(320 / 8)
    assert rate("p2p", Group(16, 1, ranks_of_host=8)) == pytest.approx(320 / 8)
    assert rate("all_gather", Group(8, 8)) == H100.within_host.bandwidth


@pytest.mark.parametrize(
    ("kind", "hosts", "megabytes", "milliseconds"),
    [
        ("all_gather", 2, 2048, 5.84),
        ("all_gather", 8, 512, 1.93),
        ("all_gather", 16, 128, 1.45),
        ("all_gather", 32, 32, 2.57),
        ("all_gather", 32, 2048, 7.76),
        ("all_to_all", 2, 1024, 12.4),
        ("all_to_all", 8, 1024, 20.9),
        ("all_to_all", 32, 2048, 50.0),
        ("all_reduce", 4, 2048, 11.4),
        ("all_reduce", 32, 32, 0.96),
        ("all_reduce", 32, 8192, 50.8),
    ],
)
def test_what_others_have_measured_over_efa(
    kind: str, hosts: int, megabytes: float, milliseconds: float
) -> None:
    """Of nccl-tests on hosts of 8 H100 (https://github.com/crazyguitar/aws-gpu-communication-benchmark,
    data/), of which the all-gathers gave the two numbers of the file."""
    ranks = 8 * hosts
    rounds = 2 if kind == "all_reduce" else 1
    sent = rounds * megabytes * 1e6 * (ranks - 1) / ranks
    took = seconds(kind, sent, Group(ranks, 8), with_fabric(H100, "efa"))
    assert 1e3 * took == pytest.approx(milliseconds, rel=0.3)


def test_what_is_wrong_with_a_fabric_is_said(tmp_path: Path) -> None:
    path = tmp_path / "net.yaml"
    for text, words in (
        ("between_hosts: {bandwidth: {1: 40}, latency: 0}", "numbers of hosts from 2 on, found 1"),
        ("between_hosts: {bandwidth: {}, latency: 0}", "found none"),
        ("between_hosts: {bandwidth: {two: 40}, latency: 0}", "keys that are integers, found two"),
        ("between_hosts: {bandwidth: {2: -4}, latency: 0}", "bandwidth.2: expected a number above"),
        (
            "{within_host: {bandwidth: {2: 4}, latency: 0}, "
            "between_hosts: {bandwidth: 1, latency: 0}}",
            "within_host.bandwidth: expected a number: tables",
        ),
    ):
        path.write_text(text)
        with pytest.raises(InputError) as raised:
            with_fabric(H100, str(path))
        assert words in str(raised.value)
    with pytest.raises(InputError, match=r"no fabrics efv: did you mean efa\?"):
        with_fabric(H100, "efv")
    path.write_text("between_hosts: {bandwidth: {2: 320, 16: 100}, latency: 1e-5}")
    mine = with_fabric(H100, str(path))
    assert mine.between_hosts.bandwidth == {2: 320, 16: 100}
    assert mine.within_host == H100.within_host
    assert str(path) in mine.source


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


def test_messages_travel_beside_products_that_take_a_share_of_the_gpu_less() -> None:
    layout = Layout({"tp": 8}).on_hosts([8])
    beside = (Product(8192, 4096, 4096),)
    group = Group(8, 8)

    def of_tp(nbytes: float, deferred: bool = False) -> float:
        sends = (Send("tp", "reduce_scatter", nbytes, times=2, beside=beside),)
        work = replace(block(), weight_grad=Pass(), input_grad=Pass(sends=sends), forward=Pass())
        [costs] = steptime.block_costs([work], layout, H100, "bfloat16", deferred=deferred)
        return costs.backward

    computing = steptime.cost(Pass(beside), layout, H100, "bfloat16")["products"]
    share = H100.compute.contention
    for nbytes in (1e6, 1e9):
        alone = seconds("reduce_scatter", nbytes, group, H100, times=2)
        assert of_tp(nbytes, deferred=True) == pytest.approx(alone)
        assert of_tp(nbytes) == pytest.approx(alone - (1 - share) * min(alone, computing))
    assert seconds("reduce_scatter", 1e6, group, H100, times=2) < computing


def test_a_compiled_block_takes_the_time_of_its_fused_kernels() -> None:
    layout = Layout({"dp_shard": 1})
    both = Pass(moved=4e9, operators=40, fused_moved=1e9, fused_operators=4)
    rate = 3350e9 * H100.compute.stream
    assert steptime.cost(both, layout, H100, "bfloat16").total() == pytest.approx(4e9 / rate)
    fused = steptime.cost(both, layout, H100, "bfloat16", compiled=True)
    assert fused.total() == pytest.approx(1e9 / rate)
    # One that cannot be compiled stays as it is.
    plain = Pass(moved=4e9, operators=40)
    assert steptime.cost(plain, layout, H100, "bfloat16", compiled=True).total() == pytest.approx(
        4e9 / rate
    )


def test_products_of_8_bits_have_a_rate_of_their_own() -> None:
    layout = Layout({"dp_shard": 1})
    wide, narrow = Product(8192, 4096, 4096), Product(8192, 4096, 4096, precision="float8")
    both = steptime.cost(Pass((wide, narrow)), layout, H100, "bfloat16")["products"]
    one = steptime.cost(Pass((wide,)), layout, H100, "bfloat16")["products"]
    assert both == pytest.approx(one * (1 + 989 / H100.compute.peak["float8"]))


def test_gradients_fill_buckets() -> None:
    """Whole parameters, up to 25 MiB a bucket; each bucket is a message of its own."""
    mib = 2**18  # elements of float32

    def of(*sizes: int) -> Work:
        parameters = tuple(Parameter(f"p{i}", (size * mib,)) for i, size in enumerate(sizes))
        return replace(block(), parameters=parameters)

    layout = Layout({"dp_replicate": 4}).on_hosts([1] * 4)
    # from the last one on: 10 + 10, then 10 + 1 + 1, then 40, then 3
    works = [of(3, 40), of(1, 1), of(10, 10, 10)]
    assert steptime.buckets_of_blocks(works, layout, size=4) == [1, 0, 3]
    assert steptime.buckets_of_blocks([], layout, size=4) == []
    frozen = [replace(block(), parameters=(Parameter("p", (mib,), trained=False),))]
    assert steptime.buckets_of_blocks(frozen, layout, size=4) == [0]
    # ZeRO-1 gathers bucket by bucket, after the update.
    step = step_of(works, layout, shards_optimizer=True)
    sent = 3 / 4 * 4 * 75 * mib
    gather = seconds("all_gather", sent, Group(4, 1), H100, times=4)
    assert step.parts["dp_replicate"] > gather
    call = H100.between_hosts.message
    assert gather - seconds("all_gather", sent, Group(4, 1), H100) > 3 * call


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
                key: replace(link.slower(1 / factor), latency=link.latency)
                for key, link in links.items()
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
