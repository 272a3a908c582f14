"""Rotary positions for longer sequences, `rope_scaling`, against transformers itself."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from meshtrain.attention import AttentionContext
from meshtrain.checkpoint.config_diff import Changes, compare_configs
from meshtrain.config import Config, ConfigErrors
from meshtrain.huggingface.rope_keys import one_form
from meshtrain.huggingface.safetensors import CONFIG
from meshtrain.job.locate import model_file
from meshtrain.rotary import (
    cos_sin,
    rotary_frequencies,
    rotary_magnitude,
    rotary_score_factor,
    rotate,
)
from tests.huggingface.models import (
    MODELS,
    REST,
    assert_loads,
    changed,
    logits,
    run_config,
    table,
    with_weights,
    write,
)

llama = model_file("llama")
MOST, LENGTH = 32, 60  # the length that a model was made for, and that of its sequences
SCALINGS: dict[str, dict[str, Any]] = table("scalings")
SIZES = {
    key: size for key, size in MODELS["gqa"].items() if key not in ("model_type", "eos_token_id")
}
SIZES |= {"hidden_size": 96, "max_position_embeddings": MOST}
LINEAR = {"rope_type": "linear", "factor": 4.0}
TOKENS = torch.randint(256, (2, LENGTH), generator=torch.Generator().manual_seed(0))


def frequencies(config: Any, length: int) -> torch.Tensor:
    arguments = (*config.rope, config.rotary_width, config.max_position_embeddings)
    return rotary_frequencies(*arguments, torch.device("cpu"), length)


def magnitude(config: Any) -> float:
    return rotary_magnitude(config.rope[1])


@pytest.mark.parametrize("theta", [500.0, 10000.0])
@pytest.mark.parametrize("name", SCALINGS)
def test_angles_and_magnitude_are_those_of_transformers(name: str, theta: float) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    for most in (MOST, 4096):
        sizes = SIZES | {
            "max_position_embeddings": most,
            "rope_parameters": {"rope_theta": theta, **SCALINGS[name]},
        }
        ours, theirs = llama.Config(**sizes), LlamaConfig(**sizes)
        assert llama.check(ours) == []
        for length in (most // 2, most, most + 1, 3 * most):
            embedding = LlamaRotaryEmbedding(theirs)
            # where `dynamic` learns the length
            embedding(torch.zeros(1), torch.arange(length)[None])
            torch.testing.assert_close(
                frequencies(ours, length).float(), embedding.inv_freq, rtol=1e-6, atol=0
            )
            assert magnitude(ours) == pytest.approx(embedding.attention_scaling, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_turned_by_angles_in_float32(dtype: torch.dtype) -> None:
    """One rounding, of the result."""
    q = torch.randn(1, 64, 2, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    narrow, exact = (
        cos_sin(torch.arange(64)[None], 500.0, {}, 8, MOST, x) for x in (dtype, torch.float64)
    )
    turned = rotate(q, *narrow)
    assert turned.dtype == dtype
    expected = rotate(q.double(), *exact)
    assert (turned == expected.to(dtype)).float().mean() > 0.999, "a tie may fall to the other side"


@pytest.mark.parametrize("name", [name for name in SCALINGS if "yarn" in name] + ["linear"])
def test_deepseek_scales_its_scores_as_in_transformers(name: str) -> None:
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3

    for scaling in (
        SCALINGS[name],
        SCALINGS[name] | ({"mscale_all_dim": 1.0} if "yarn" in name else {}),
    ):
        expected = deepseek_v3.yarn_apply_mscale(
            {key: x for key, x in scaling.items() if x is not None}, 0.125
        )
        assert 0.125 * rotary_score_factor(scaling) == pytest.approx(expected, rel=1e-12)


def scaled_model(folder: Path, name: str) -> torch.nn.Module:
    """A model of transformers that lies in a folder, too."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    rope = {"rope_theta": 500.0, **SCALINGS[name]}
    model = LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=rope)).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("form", ["rope_parameters", "rope_scaling", "type"])
@pytest.mark.parametrize("name", SCALINGS)
def test_a_model_goes_in_and_out_with_its_scaling(name: str, form: str, tmp_path: Path) -> None:
    expected = logits(scaled_model(tmp_path / "in", name), TOKENS)
    if form != "rope_parameters":  # as transformers wrote it before 5, and before 4.43
        scaling = dict(SCALINGS[name])
        scaling[form if form == "type" else "rope_type"] = scaling.pop("rope_type")
        config = changed(tmp_path / "in", rope_parameters=None, rope_theta=500.0) / CONFIG
        config.write_text(json.dumps(json.loads(config.read_text()) | {"rope_scaling": scaling}))
    config = run_config(tmp_path / "in")
    ours = with_weights(config)
    assert (logits(ours, TOKENS) - expected).abs().max() <= 1e-5
    plain = llama.Model(llama.Config(**SIZES, rope_theta=500.0))
    plain.load_state_dict(ours.state_dict())
    changes = SCALINGS[name]["factor"] > 1
    assert bool((logits(plain, TOKENS) - expected).abs().max() > 1e-2) == changes, (
        "the scaling shows in these tokens"
    )

    write(ours, tmp_path / "out", config)
    assert_loads(tmp_path / "out", expected, TOKENS)
    again, before = (
        llama.Config(**run_config(tmp_path / folder).model.keys) for folder in ("out", "in")
    )
    assert torch.equal(frequencies(again, LENGTH), frequencies(before, LENGTH))
    assert magnitude(again) == magnitude(before)


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}, "rope_scaling": LINEAR},
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 5.0},
            "rope_scaling": LINEAR,
            "rope_theta": 7.0,
        },
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}, "rope_theta": 7.0},
        {"rope_parameters": {"rope_type": "default"}, "rope_theta": 7.0},
        {"rope_parameters": {"rope_theta": 5.0, **LINEAR}, "rope_scaling": None},
        {"rope_scaling": {"rope_theta": 9.0, **LINEAR}, "rope_theta": 7.0},
    ],
)
def test_where_keys_of_a_file_contradict_each_other_those_count_that_transformers_uses(
    keys: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import AutoConfig

    folder = tmp_path / "in"
    scaled_model(folder, "linear")
    written = json.loads((folder / CONFIG).read_text())
    without = {key: value for key, value in written.items() if not key.startswith("rope_")}
    (folder / CONFIG).write_text(json.dumps(without | keys))
    theirs = AutoConfig.from_pretrained(folder).rope_parameters
    theta, scaling = llama.Config(**run_config(folder).model.keys).rope
    assert (theta, scaling.get("rope_type", "default")) == (
        theirs["rope_theta"],
        theirs["rope_type"],
    )
    assert scaling.get("factor") == theirs.get("factor")


def test_a_yaml_overrides_what_a_file_or_a_checkpoint_says_of_rotary_positions(
    tmp_path: Path,
) -> None:
    """Also where one of them gives both keys in one, and the other gives them apart."""
    rope = {"rope_theta": 5.0, "rope_type": "linear", "factor": 4.0}
    folder = tmp_path / "in"
    scaled_model(folder, "linear")
    changed(folder, rope_parameters=rope, rope_scaling=None, rope_theta=None)
    cases = (
        ("model.rope_theta=7.0", (7.0, 4.0)),
        ("model.rope_scaling={rope_type: linear, factor: 2.0}", (5.0, 2.0)),
        ("model.rope_parameters={rope_type: linear, factor: 2.0, rope_theta: 9.0}", (9.0, 2.0)),
    )
    for override, expected in cases:
        theta, scaling = llama.Config(**run_config(folder, override).model.keys).rope
        assert (theta, scaling["factor"]) == expected, override


@pytest.mark.parametrize(
    ("written", "theta", "scaling"),
    [
        ("rope_parameters: {rope_type: default, rope_theta: 500000}", 5e5, None),
        ("rope_parameters: {rope_type: linear, factor: 4.0, rope_theta: 500000}", 5e5, LINEAR),
        ("rope_scaling: {rope_type: linear, factor: 4.0, rope_theta: 500000}", 5e5, LINEAR),
        ("rope_scaling: {rope_type: linear, factor: 4.0}, rope_parameters: {}", 1e4, LINEAR),
        # Twice the same.
        (
            "rope_theta: 500000, rope_parameters: {rope_type: default, rope_theta: 500000}",
            5e5,
            None,
        ),
        (
            "rope_scaling: {rope_type: linear, factor: 4.0}, rope_parameters: {rope_type: linear, "
            "factor: 4}",
            1e4,
            LINEAR,
        ),
    ],
)
def test_a_resolved_config_says_rotary_positions_once_and_gives_an_equal_one(
    written: str, theta: float, scaling: dict[str, Any] | None, tmp_path: Path
) -> None:
    first, again = tmp_path / "first.yaml", tmp_path / "config.yaml"
    first.write_text(f"model: {{name: llama, {written}}}{REST}")
    config = Config.load(str(first))
    again.write_text(config.to_yaml())
    assert Config.load(str(again)) == config
    keys = config.model.keys
    assert repr(keys["rope_theta"]) == repr(theta)
    assert (keys["rope_scaling"], keys["rope_parameters"]) == (scaling, None)


def test_the_config_of_an_older_checkpoint_has_both_forms() -> None:
    """Older versions of meshtrain kept `rope_parameters`, which counted, beside the default of
    `rope_theta`."""
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 500000}
    older = {"name": "llama", "rope_theta": 1e4, "rope_scaling": None, "rope_parameters": rope}
    newer = {"name": "llama", "rope_theta": 5e5, "rope_scaling": LINEAR, "rope_parameters": None}
    assert one_form(older) == newer
    assert one_form(newer) == newer
    assert compare_configs({"model": older}, {"model": newer}) == Changes()
    assert compare_configs({"model": newer}, {"model": older | {"rope_parameters": None}}).refused
    damaged = older | {"rope_parameters": 3}
    assert one_form(damaged) == damaged


def test_the_type_may_stand_in_rope_parameters_by_its_old_name() -> None:
    rope = {"rope_theta": 500.0, "type": "linear", "factor": 4.0}
    keys = llama.from_hugging_face({"rope_parameters": rope})
    assert (keys["rope_theta"], keys["rope_scaling"]) == (500.0, {"type": "linear", "factor": 4.0})


def test_dynamic_scaling_follows_the_length_of_the_whole_sequence() -> None:
    """And not the part that a rank sees, the longest document, or what else is in the
    microbatch."""
    torch.manual_seed(0)
    model = llama.Model(llama.Config(**SIZES, rope_scaling=SCALINGS["dynamic"])).double()
    whole = model(TOKENS)
    positions = torch.arange(20).expand(2, 20)
    # the first tokens see no others
    part = model(TOKENS[:, :20], positions, AttentionContext(length=LENGTH))
    torch.testing.assert_close(part, whole[:, :20], rtol=1e-9, atol=1e-9)
    assert not torch.allclose(model(TOKENS[:, :20]), whole[:, :20], rtol=1e-3)
    documents = (torch.arange(LENGTH) >= 20).long().expand(2, LENGTH)
    positions = torch.cat((torch.arange(20), torch.arange(LENGTH - 20))).expand(2, LENGTH)
    torch.testing.assert_close(
        model(TOKENS, positions, documents)[:, :20], part, rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("name", ["dynamic", "yarn", "linear"])
def test_only_dynamic_scaling_takes_sequences_above_the_length_of_the_model(
    name: str, tmp_path: Path
) -> None:
    scaled_model(tmp_path / "in", name)
    if name == "dynamic":
        assert run_config(tmp_path / "in", f"data.seq_len={LENGTH}").data.seq_len == LENGTH
    else:
        with pytest.raises(ConfigErrors, match=f"raise the model's key to {LENGTH}"):
            run_config(tmp_path / "in", f"data.seq_len={LENGTH}")
