"""Small copies keep what a layout may get wrong, and a covering set has every two axes together."""

import json
from itertools import combinations
from math import prod
from pathlib import Path
from typing import Any

import pytest

from meshtrain.config import Config, spec_of
from meshtrain.job.locate import model_file
from meshtrain.layout import AXES
from meshtrain.modeling.build import parameter_count
from meshtrain.verify.covering import covering_layouts
from meshtrain.verify.ranks import ForkedRanks
from meshtrain.verify.session import Subject, Verification
from meshtrain.verify.small import (
    HEAD_DIM_OF_8_BITS,
    MOST_PARAMETERS,
    small_batch,
    small_model,
    small_sequence,
)

MODELS = ("llama", "qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3")
# The largest of each model.
PRESETS = [
    (name, max(presets, key=lambda preset: presets[preset]["hidden_size"]))
    for name in MODELS
    if (presets := getattr(model_file(name), "presets", {}))
]


def keys_of(name: str, preset: str) -> dict[str, Any]:
    config = Config.load(
        "tests/fuzz/base.yaml",
        [f"model={{name: {name}, preset: {preset}}}", "train.steps=1", "layout={dp_shard: 1}"],
    )
    return dict(config.model.keys)


@pytest.mark.parametrize(("name", "preset"), PRESETS)
def test_a_small_copy_of_each_preset(name: str, preset: str) -> None:
    keys = keys_of(name, preset)
    layouts = [{"tp": 2}, {"pp": 2, "dp_shard": 2}, {"cp": 4}]
    small = {**keys, **small_model(keys, layouts=layouts, stages=4, experts=2)}
    overrides = [f"model={{name: {name}}}", "train.steps=1", "layout={dp_shard: 1}"]
    config = Config.load(
        "tests/fuzz/base.yaml",
        [*overrides, *(f"model.{key}={json.dumps(value)}" for key, value in small.items())],
    )
    assert parameter_count(spec_of(config).meta) < MOST_PARAMETERS
    assert small["num_hidden_layers"] == 4, "as many as there are stages"

    def groups(of: dict[str, Any]) -> tuple[bool, bool]:
        heads, key_value = of["num_attention_heads"], of["num_key_value_heads"] or 0
        return heads > key_value > 0, key_value > 1

    assert groups(small) == groups(keys)
    assert small["tie_word_embeddings"] == keys["tie_word_embeddings"]
    head_dim = keys.get("head_dim")
    if head_dim is not None:
        follows = head_dim * keys["num_attention_heads"] == keys["hidden_size"]
        assert (small["head_dim"] * small["num_attention_heads"] == small["hidden_size"]) == follows
    experts = next(
        (k for k in ("num_experts", "num_local_experts", "n_routed_experts") if keys.get(k)), None
    )
    if experts is not None:
        assert 1 < small["num_experts_per_tok"] < small[experts]
    if keys.get("n_group", 1) > 1:
        assert 0 < small["topk_group"] < small["n_group"]
    if keys.get("first_k_dense_replace"):
        assert 0 < small["first_k_dense_replace"] < small["num_hidden_layers"]


def test_layers_of_every_kind_and_windows_stay() -> None:
    keys = {
        "hidden_size": 3072,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "num_hidden_layers": 12,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 2,
        "sliding_window": 4096,
    }
    small = small_model(keys, layouts=[{"tp": 2}], stages=1, experts=1)
    assert small["layer_types"] == keys["layer_types"][:6]
    assert small["num_hidden_layers"] == 6
    assert 0 < small["sliding_window"] < 32, "shorter than a sequence"
    assert (small["num_attention_heads"], keys["num_key_value_heads"]) == (4, 1)


def test_heads_divide_over_the_largest_tp() -> None:
    keys = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
    small = small_model(keys, layouts=[{"tp": 8}], stages=1, experts=1)
    assert small["num_attention_heads"] % 8 == 0


def test_what_is_uneven_on_the_ranks_stays_uneven() -> None:
    keys = {
        "hidden_size": 192,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "intermediate_size": 513,
        "vocab_size": 50257,
        "num_experts": 66,
        "moe_intermediate_size": 144,
    }
    small = small_model(keys, layouts=[{"tp": 2}], stages=1, experts=4)
    assert small["vocab_size"] == 257
    assert small["num_experts"] % 4 != 0
    assert (small["intermediate_size"], small["moe_intermediate_size"]) == (129, 24)
    few = {**keys, **small}
    assert (few["num_attention_heads"], few["num_key_value_heads"]) == (6, 3)
    # and what is even stays even, as that takes another way
    keys = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
    small = small_model(keys, layouts=[{"tp": 4}], stages=1, experts=1)
    assert (small["num_attention_heads"], small["num_key_value_heads"]) == (8, 4)

    assert small_sequence(256, [{"cp": 2}, {"tp": 2}]) == 32
    assert small_sequence(250, [{"cp": 2}, {"tp": 2}]) % 4 == 2, "padded by cp, divided by tp"
    assert small_batch(16, [{"dp_shard": 2}, {"tp": 2}]) == 12
    assert small_batch(15, [{"dp_shard": 2}]) % 2 == 1


def test_layers_for_products_of_8_bits_stay_wide() -> None:
    keys = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
    few = {"layouts": [{"tp": 2}], "stages": 1, "experts": 1}
    assert small_model(keys, **few)["hidden_size"] < 128
    assert small_model(keys, **few, head_dim=HEAD_DIM_OF_8_BITS)["hidden_size"] == 128


def test_a_small_model_stays_as_it_is() -> None:
    keys = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
    assert small_model(keys, layouts=[{"tp": 2}], stages=1, experts=1) == {}


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_every_axis_and_every_two_axes_that_fit(ranks: int) -> None:
    layouts = covering_layouts(ranks)
    assert all(prod(layout.values()) == ranks for layout in layouts)
    for axis in AXES:
        assert {axis: ranks} in layouts
    has_divisor = any(ranks % n == 0 for n in range(2, ranks))
    for pair in combinations(AXES, 2):
        together = any(set(pair) <= set(layout) for layout in layouts)
        assert together == has_divisor


def test_settings_of_layouts_decide_how_small(tmp_path: Path) -> None:
    """One process goes without them, and the copy must not."""
    stages = ["pipeline.schedule=interleaved-1f1b", "pipeline.stages_per_rank=4"]
    pipeline = Subject("quickstart", ["model.num_hidden_layers=16", *stages], [], 5, "float64")
    small = Verification(pipeline, ForkedRanks(), tmp_path, [{"pp": 2}])._small_copy()
    assert "model.num_hidden_layers=8" in small
    dealt_out = ["model.num_experts=32", "parallel.expert_parallel=16"]
    experts = Subject("moe", dealt_out, [], 5, "float64")
    small = Verification(experts, ForkedRanks(), tmp_path, [{"dp_shard": 16}])._small_copy()
    assert "model.num_experts=16" in small
