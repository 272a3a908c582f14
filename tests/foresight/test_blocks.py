"""The counted work of blocks: weight gradients, which some schedules put off, are a pass of their
own."""

import gc
import json
from collections import Counter

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from meshtrain.config import Config
from meshtrain.foresight import blocks, predict
from meshtrain.foresight.blocks import _counted, works_of
from meshtrain.foresight.work import Pass, Work
from meshtrain.modeling.build import plain_model
from tests.foresight.traced import SMALL
from tests.launching import ROOT

QUICKSTART = str(ROOT / "configs/quickstart.yaml")


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


def test_garbage_is_collected_between_microbatches_only() -> None:
    """In the middle of a block a collection would free what others still seem to hold."""
    file = "configs/quickstart.yaml"
    overrides = [*SMALL[file], "layout={dp_shard: 1}"]
    config = Config.load(ROOT / file, overrides, world_size=1)
    generations = []

    def collecting(phase: str, about: dict[str, int]) -> None:
        if phase == "start" and not gc.isenabled():
            generations.append(about["generation"])

    gc.callbacks.append(collecting)
    try:
        _counted(config, config.resolved)
    finally:
        gc.callbacks.remove(collecting)
    # Before each of the microbatches with one sample, with one and with two.
    assert generations == [2, 2, 2]
    assert gc.isenabled()


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


def attention_flops(*overrides: str, world_size: int = 1) -> tuple[float, float]:
    """Of a layer's forward, and of its backward."""
    keys = [*SMALL["configs/quickstart.yaml"], "batch.micro_size=1", *overrides]
    config = Config.load(ROOT / "configs/quickstart.yaml", keys, world_size=world_size)
    work = next(work for work in works_of(config, config.resolved) if "layers" in work.name)
    return work.forward.attention_flops, work.input_grad.attention_flops


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_attention_computes_the_pairs_that_see_each_other(precision: str) -> None:
    """4 heads of 16 features on 32 tokens, of which each sees itself and those before it; a
    backward has five products for a forward's two. Over `cp` all ranks together compute as many."""
    pairs = 32 * 33 / 2
    keys = f"train.precision={precision}", "model.hidden_size=64"
    forward, backward = attention_flops(*keys)
    assert forward == 2 * 4 * pairs * 2 * 16
    assert backward == 2.5 * forward
    # A rank of two has the first and the last quarter of the tokens, or the two in the middle.
    over_cp, _ = attention_flops(*keys, "layout={cp: 2}", world_size=2)
    assert over_cp == pytest.approx(forward / 2)


def test_packed_documents_are_attended_as_on_a_gpu() -> None:
    """In 16 bits by the kernel for them, in which one document of a whole sample computes what
    causal attention does; else by a mask, with all pairs."""
    sixteen, thirty_two = (
        (f"train.precision={precision}", "model.hidden_size=64")
        for precision in ("bfloat16", "float32")
    )
    packed = "data.mask_documents=true"
    assert attention_flops(*sixteen, packed) == attention_flops(*sixteen)
    assert attention_flops(*thirty_two, packed)[0] == 2 * 4 * 32 * 32 * 2 * 16
    keys = *SMALL["configs/quickstart.yaml"], *sixteen, "data.seq_len=512", "batch.micro_size=1"
    plain, with_documents = (
        predict(QUICKSTART, [*keys, "parallel.compile=true", *more], hosts=(1,)).memory
        for more in ((), (packed,))
    )
    numbers = 512 * 8 + 2 * 4  # of documents, and where they begin and end
    assert 0 <= with_documents.total - plain.total <= 2 * numbers


def test_latent_attention_in_16_bits() -> None:
    """Its values are narrower than its keys, which flash attention does not take."""
    sizes = {
        "name": "deepseek_v3",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "vocab_size": 256,
    }
    keys = ["data.seq_len=32", "train.precision=bfloat16", "batch={global_size: 8, micro_size: 1}"]
    keys.append(f"model={json.dumps(sizes)}")
    for layout, world_size in (("{dp_shard: 1}", 1), ("{cp: 2}", 2)):
        config = Config.load(
            ROOT / "configs/quickstart.yaml", [*keys, f"layout={layout}"], world_size=world_size
        )
        work = next(work for work in works_of(config, config.resolved) if "layers" in work.name)
        pairs = 32 * 33 / 2 / world_size
        # Over `cp` values are padded to the width of keys.
        widths = 24 + (16 if world_size == 1 else 24)
        assert work.forward.attention_flops == pytest.approx(2 * 4 * pairs * widths)


def test_products_of_8_bits_are_told_from_others() -> None:
    """Those of the forward and of the gradients of inputs, of layers that are wide enough; those of
    weights stay in 16 bits."""
    overrides = "train.precision=bfloat16", "train.linear_precision=float8", "model.hidden_size=128"
    layer, _ = layers("configs/quickstart.yaml", *overrides, "model.intermediate_size=256")
    counts = [Counter(product.precision for product in one.products) for one in layer.passes]
    assert counts == [{"float8": 5, None: 2}, {"float8": 5, None: 2}, {None: 7}]


def test_messages_are_counted_and_travel_beside_weight_gradients() -> None:
    """With sequence parallelism a layer gathers twice and scatters twice in each direction; the sums
    of the inputs' gradients of q, k, v and of gate and up travel while their weights' gradients are
    computed."""
    layer, _ = layers("configs/quickstart.yaml", "layout.tp=2", world_size=4)
    counts = {
        (name, send.kind): (send.times, len(send.beside))
        for name in ("forward", "input_grad", "weight_grad")
        for send in getattr(layer, name).sends
    }
    assert counts == {
        ("forward", "all_gather"): (2, 0),
        ("forward", "reduce_scatter"): (2, 0),
        ("input_grad", "all_gather"): (2, 0),
        ("input_grad", "reduce_scatter"): (2, 5),
    }
    [scatter] = [send for send in layer.input_grad.sends if send.kind == "reduce_scatter"]
    assert set(scatter.beside) <= set(layer.weight_grad.products)
