"""The counted work of blocks: weight gradients, which some schedules put off, are a pass of their
own."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from meshtrain.config import Config
from meshtrain.foresight import blocks
from meshtrain.foresight.blocks import _counted, count_works, works_of
from meshtrain.foresight.work import Pass, Work
from meshtrain.modeling.build import plain_model
from tests.foresight.traced import SMALL
from tests.launching import ROOT


def layers(file: str, *overrides: str, world_size: int = 2) -> list[Work]:
    """Of a stage whose schedule puts weight gradients off."""
    pipeline = "layout.pp=2", "pipeline.schedule=zb-h1"
    config = Config.load(ROOT / file, [*SMALL[file], *pipeline, *overrides], world_size=world_size)
    return [work for work in works_of(config, config.resolved) if "layers" in work.name]


def flops(of: Pass) -> float:
    return sum(product.flops for product in of.products)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_each_product_of_a_forward_has_one_for_the_weights(recompute: str, tp: int) -> None:
    """And one for the input, beside what is computed again. Sums over tokens are the weights'
    gradients."""
    overrides = f"layout.tp={tp}", f"parallel.recompute={recompute}"
    first, second = layers("configs/quickstart.yaml", *overrides, world_size=2 * tp)
    assert first is second  # of one kind
    tokens = 2 * 32
    assert (
        len(first.forward.products)
        == len(first.weight_grad.products)
        == first.weight_grad.operators
        == 7
    )
    assert {product.k for product in first.weight_grad.products} == {tokens}
    assert all(
        product.k != tokens for product in (*first.forward.products, *first.input_grad.products)
    )
    assert flops(first.weight_grad) == flops(first.forward)
    assert flops(first.input_grad) == flops(first.forward) * (2 if recompute == "full" else 1)
    assert first.weight_grad.attention_flops == 0 < first.input_grad.attention_flops


@pytest.mark.parametrize("ranks", [1, 2])
def test_experts_too(ranks: int) -> None:
    """But for the router's, which autograd computes with the gradient of its input."""
    first, _ = layers("configs/moe.yaml", f"parallel.expert_parallel={ranks}", world_size=2 * ranks)
    [router] = [product for product in first.forward.products if product.n == 16]
    assert len(first.weight_grad.products) == 6
    assert flops(first.weight_grad) == flops(first.forward) - router.flops


@pytest.mark.parametrize(
    "override",
    [
        "train.lora={rank: 2}",
        'train.freeze=["*.layers.*"]',
        "parallel.recompute=full",
        "train.precision=float64",
    ],
)
def test_works_of_one_config_are_not_those_of_another(override: str) -> None:
    """Each is counted once: what it depends on is part of its key."""
    plain, other = (
        layers("configs/quickstart.yaml")[0],
        layers("configs/quickstart.yaml", override)[0],
    )
    assert vars(plain) != vars(other)
    assert layers("configs/quickstart.yaml")[0] == plain


def test_works_are_counted_in_processes_at_once() -> None:
    """They are those that are counted here."""
    overrides = [
        *SMALL["configs/quickstart.yaml"],
        "layout={dp_shard: -1, cp: 2}",
        "data.seq_len=48",
    ]
    loaded = [
        Config.load("configs/quickstart.yaml", [*overrides, f"layout.tp={tp}"], world_size=4)
        for tp in (1, 2)
    ]
    with ProcessPoolExecutor(2, get_context("fork")) as pool:
        count_works(loaded, pool)
    pairs = [blocks._known[blocks._key(config, config.resolved)][0] for config in loaded]
    assert pairs == [_counted(config, config.resolved) for config in loaded]


def test_what_fsdp_gathers_over_cp_is_not_the_blocks() -> None:
    """Half the tokens read and write half as much, whatever FSDP frees; a search begins with
    either."""
    overrides = (
        *SMALL["configs/quickstart.yaml"],
        "train.precision=bfloat16",
        "model.num_hidden_layers=3",
    )
    pairs = []
    for layout, frees, world in (
        ("{dp_shard: 1}", "true", 1),
        ("{cp: 2}", "true", 2),
        ("{cp: 2}", "false", 2),
    ):
        keys = [*overrides, f"layout={layout}", f"parallel.reshard_after_forward={frees}"]
        config = Config.load(ROOT / "configs/quickstart.yaml", keys, world_size=world)
        pairs.append(_counted(config, config.resolved))
    assert pairs[1] == pairs[2]
    whole, half = (of[max(of)][0].forward.moved for of in pairs[:2] if isinstance(of, dict))
    assert half < 0.6 * whole


def test_it_grows_with_the_samples() -> None:
    """Of three samples what one and two foretell."""
    one, two, three = (
        layers("configs/quickstart.yaml", f"batch.micro_size={n}")[0] for n in (1, 2, 3)
    )
    for name in ("forward", "input_grad", "weight_grad"):
        a, b, c = (flops(getattr(work, name)) for work in (one, two, three))
        assert c - b == b - a > 0
    saved = [work.memory.saved for work in (one, two, three)]
    assert saved[2] - saved[1] == saved[1] - saved[0] > 0


@pytest.mark.parametrize("transposed", [False, True])
def test_the_product_of_a_convolution(transposed: bool) -> None:
    x, weight = (torch.empty(*sizes, device="meta") for sizes in ((2, 4, 9, 9), (4, 4, 3, 3)))
    keys = [2, 2], [1, 1], [1, 1], transposed, [0, 0], 1
    output = torch.ops.aten.convolution(x, weight, None, *keys)
    calls = (
        ("convolution", (x, weight, None, *keys)),
        ("convolution_backward", (output, x, weight, None, *keys, [True, True, False])),
    )
    for name, arguments in calls:
        with FlopCounterMode(display=False) as counter:
            results = getattr(torch.ops.aten, name)(*arguments)
        product = blocks._product(f"aten::{name}", arguments, results)
        assert product.flops == counter.get_total_flops() > 0


def test_convolutions_are_products() -> None:
    """As many FLOPs as torch counts for the forward and the backward of a microbatch of images."""
    config = Config.load(
        ROOT / "configs/digits.yaml", list(SMALL["configs/digits.yaml"]), world_size=1
    )
    works = works_of(config, config.resolved)
    passes = [of for work in works for of in (work.forward, work.input_grad, work.weight_grad)]
    model, images = (
        plain_model(config),
        torch.zeros(config.batch.micro_size, 1, 8, 8, device="meta"),
    )
    with FlopCounterMode(display=False) as counter:
        model(images).sum().backward()
    assert sum(map(flops, passes)) == counter.get_total_flops() > 0
