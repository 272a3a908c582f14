"""Rotary positions for longer sequences, `rope_scaling`, against transformers itself."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3
from transformers.models.glm4_moe import modeling_glm4_moe as glm4_moe
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from meshtrain.attention import AttentionContext
from meshtrain.config import Config, ConfigErrors
from meshtrain.config.locate import model_file
from meshtrain.huggingface.load import load_weights, open_folder
from meshtrain.huggingface.safetensors import CONFIG
from meshtrain.job.environment import read_environment
from meshtrain.job.process import Job
from meshtrain.layout import Layout
from meshtrain.mesh import build_mesh
from meshtrain.modeling.build import plain_model
from meshtrain.rotary import (
    cos_sin,
    rotary_frequencies,
    rotary_magnitude,
    rotary_score_factor,
    rotate,
    rotate_interleaved,
)
from meshtrain.run.weights_export import export

llama = model_file("llama")
MOST, LENGTH = 32, 60  # the length that a model was made for, and that of its sequences
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": MOST}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": YARN,
    "yarn, original length by default": {"rope_type": "yarn", "factor": 4.0},
    "yarn, betas": YARN | {"beta_fast": 8, "beta_slow": 2, "truncate": False},
    "yarn, mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 0.9},
    "yarn, one mscale": YARN | {"mscale": 0.7, "mscale_all_dim": None},
    "yarn, attention_factor": YARN | {"attention_factor": 1.3},
    "yarn, all pairs slow": YARN | {"original_max_position_embeddings": 4},
    "yarn, factor 1": YARN | {"factor": 1.0},
    "llama3": LLAMA3 | {"original_max_position_embeddings": MOST},
    "llama3, original length by default": LLAMA3,
}
SIZES: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": MOST,
}
TOKENS = torch.randint(256, (2, LENGTH), generator=torch.Generator().manual_seed(0))


def frequencies(config: Any, length: int) -> torch.Tensor:
    arguments = (*config.rope, config.rotary_width, config.max_position_embeddings)
    return rotary_frequencies(*arguments, torch.device("cpu"), length)


def magnitude(config: Any) -> float:
    return rotary_magnitude(config.rope[1])


@pytest.mark.parametrize("theta", [500.0, 10000.0])
@pytest.mark.parametrize("name", SCALINGS)
def test_angles_and_magnitude_are_those_of_transformers(name: str, theta: float) -> None:
    for most in (MOST, 4096):
        sizes = SIZES | {"max_position_embeddings": most, "rope_parameters": {"rope_theta": theta, **SCALINGS[name]}}
        ours = llama.Config(**sizes)
        assert llama.check(ours) == []
        for length in (most // 2, most, most + 1, 3 * most):
            theirs = LlamaRotaryEmbedding(LlamaConfig(**sizes))
            theirs(torch.zeros(1), torch.arange(length)[None])  # where `dynamic` learns the length
            torch.testing.assert_close(frequencies(ours, length).float(), theirs.inv_freq, rtol=1e-6, atol=0)
            assert magnitude(ours) == pytest.approx(theirs.attention_scaling, rel=1e-12)


def test_parts_and_interleaved_pairs_turn_as_in_transformers() -> None:
    """Features that do not turn stay; pairs of neighbours come out as halves."""
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 7, heads, 12, dtype=torch.float64, generator=draw) for heads in (4, 2))
    positions = torch.randint(100, (2, 7), generator=draw)
    cos, sin = cos_sin(positions, 500.0, {}, 8, MOST, torch.float64)
    full = [torch.cat((x, x), dim=-1).squeeze(2) for x in (cos, sin)]
    for ours, theirs in zip(
        (rotate(q, cos, sin), rotate(k, cos, sin)),
        glm4_moe.apply_rotary_pos_emb(q, k, *full, unsqueeze_dim=2),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)
    q, k = q[..., :8], k[..., :8]
    expected = deepseek_v3.apply_rotary_pos_emb_interleave(q, k, *full, unsqueeze_dim=2)
    for x, theirs in zip((q, k), expected, strict=True):
        torch.testing.assert_close(rotate_interleaved(x, cos, sin), theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_turned_by_angles_in_float32(dtype: torch.dtype) -> None:
    """One rounding, of the result."""
    q = torch.randn(1, 64, 2, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    narrow, exact = (cos_sin(torch.arange(64)[None], 500.0, {}, 8, MOST, x) for x in (dtype, torch.float64))
    turned = rotate(q, *narrow)
    assert turned.dtype == dtype
    expected = rotate(q.double(), *exact)
    assert (turned == expected.to(dtype)).float().mean() > 0.999, "a tie may fall to the other side"


@pytest.mark.parametrize("name", [name for name in SCALINGS if "yarn" in name] + ["linear"])
def test_deepseek_scales_its_scores_as_in_transformers(name: str) -> None:
    for scaling in (SCALINGS[name], SCALINGS[name] | ({"mscale_all_dim": 1.0} if "yarn" in name else {})):
        expected = deepseek_v3.yarn_apply_mscale({key: x for key, x in scaling.items() if x is not None}, 0.125)
        assert 0.125 * rotary_score_factor(scaling) == pytest.approx(expected, rel=1e-12)


def test_the_numbers_of_the_papers() -> None:
    """https://arxiv.org/abs/2309.00071: section 3.4, 0.1 ln(s) + 1 with Llama 2 over 64k; 3.1, b s^(d / (d - 2))."""
    ours = llama.Config(rope_scaling={"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096})
    assert magnitude(ours) == pytest.approx(1.2772588722239782)
    scaling = {"rope_type": "dynamic", "factor": 1.0}  # with 1 the base grows by s^(d / (d - 2)) alone
    ours = llama.Config(hidden_size=128, num_attention_heads=1, max_position_embeddings=4096, rope_scaling=scaling)
    base = 10000 * 8 ** (128 / 126)
    torch.testing.assert_close(frequencies(ours, 8 * 4096)[1], torch.tensor(base ** (-2 / 128), dtype=torch.float64))


def read(folder: Path, *overrides: str) -> Config:
    path = folder.parent / "mine.yaml"
    path.write_text(f"model: {{weights: {folder}}}\nbatch: {{global_size: 4, micro_size: 4}}\ntrain: {{steps: 2}}\n")
    return Config.load(str(path), [f"data.seq_len={MOST}", *overrides])


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        output = model(TOKENS)
    return output if isinstance(output, torch.Tensor) else output.logits


@pytest.mark.parametrize("form", ["rope_parameters", "rope_scaling", "type"])
@pytest.mark.parametrize("name", SCALINGS)
def test_a_model_goes_in_and_out_with_its_scaling(name: str, form: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    rope = {"rope_theta": 500.0, **SCALINGS[name]}
    theirs = LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=rope, initializer_range=0.1)).eval()
    theirs.save_pretrained(tmp_path / "in")
    if form != "rope_parameters":  # as transformers wrote it before 5, and before 4.43
        keys = json.loads((tmp_path / "in" / CONFIG).read_text())
        scaling = {(form if key == "rope_type" and form == "type" else key): v for key, v in SCALINGS[name].items()}
        del keys["rope_parameters"]
        (tmp_path / "in" / CONFIG).write_text(json.dumps(keys | {"rope_theta": 500.0, "rope_scaling": scaling}))
    config = read(tmp_path / "in")
    ours = plain_model(config).to_empty(device="cpu")
    with open_folder(config.model.weights) as source:
        load_weights(ours, source)
    expected = logits_of(theirs)
    assert (logits_of(ours) - expected).abs().max() <= 1e-5
    plain = llama.Model(llama.Config(**SIZES, rope_theta=500.0))
    plain.load_state_dict(ours.state_dict())
    changes = SCALINGS[name]["factor"] > 1
    assert bool((logits_of(plain) - expected).abs().max() > 1e-2) == changes  # the scaling shows in these tokens

    job, mesh = Job(read_environment({}), torch.device("cpu"), None), build_mesh(Layout({}), "cpu")
    described = llama.to_hugging_face(ours.config)
    export(ours, tmp_path / "out", job, mesh, dtype=torch.float32, config=described)
    assert (logits_of(LlamaForCausalLM.from_pretrained(tmp_path / "out").eval()) - expected).abs().max() <= 1e-5
    again, before = llama.Config(**read(tmp_path / "out").model.keys), llama.Config(**config.model.keys)
    assert torch.equal(frequencies(again, LENGTH), frequencies(before, LENGTH))
    assert magnitude(again) == magnitude(before)


def test_the_type_may_stand_in_rope_parameters_by_its_old_name() -> None:
    rope = {"rope_theta": 500.0, "type": "linear", "factor": 4.0}
    keys = llama.from_hugging_face({"rope_parameters": rope})
    assert (keys["rope_theta"], keys["rope_scaling"]) == (500.0, {"type": "linear", "factor": 4.0})


def test_dynamic_scaling_follows_the_length_of_the_whole_sequence() -> None:
    """And not the part that a rank sees, the longest document, or what else is in the microbatch."""
    torch.manual_seed(0)
    model = llama.Model(llama.Config(**SIZES, rope_scaling=SCALINGS["dynamic"])).double()
    whole = model(TOKENS)
    positions = torch.arange(20).expand(2, 20)
    part = model(TOKENS[:, :20], positions, AttentionContext(length=LENGTH))  # the first tokens see no others
    torch.testing.assert_close(part, whole[:, :20], rtol=1e-9, atol=1e-9)
    assert not torch.allclose(model(TOKENS[:, :20]), whole[:, :20], rtol=1e-3)
    documents = (torch.arange(LENGTH) >= 20).long().expand(2, LENGTH)
    positions = torch.cat((torch.arange(20), torch.arange(LENGTH - 20))).expand(2, LENGTH)
    torch.testing.assert_close(model(TOKENS, positions, documents)[:, :20], part, rtol=1e-9, atol=1e-9)


def test_only_dynamic_scaling_takes_sequences_above_the_length_of_the_model(tmp_path: Path) -> None:
    for name, theirs in {name: SCALINGS[name] for name in ("dynamic", "yarn", "linear")}.items():
        LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters={"rope_theta": 500.0, **theirs})).save_pretrained(
            tmp_path / name
        )
        if name == "dynamic":
            assert read(tmp_path / name, f"data.seq_len={LENGTH}").data.seq_len == LENGTH
        else:
            with pytest.raises(ConfigErrors, match=f"raise the model's key to {LENGTH}"):
                read(tmp_path / name, f"data.seq_len={LENGTH}")


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("scaling", "says"),
    [
        ({"rope_type": "longrope", "factor": 2.0}, "'longrope' is not built: use linear, dynamic, yarn, llama3"),
        ({"rope_type": None, "factor": 2.0}, "None is not built"),
        ({"rope_type": "linear"}, "rope_type linear needs the numbers factor, above 0; missing: factor"),
        ({"type": "dynamic", "factor": "2"}, "missing: factor"),
        ({"rope_type": "yarn", "factor": True}, "missing: factor"),
        ({"rope_type": "linear", "factor": 0.5}, "factor is 0.5: expected at least 1"),
        ({"rope_type": "linear", "factor": 2, "beta_fast": 3}, "linear has factor, not beta_fast: take it away"),
        (YARN | {"partial_rotary_factor": 0.5}, "not partial_rotary_factor: take it away"),
        (YARN | {"truncate": None}, "truncate is None: expected true or false"),
        (YARN | {"attention_factor": -1.0}, "attention_factor is -1.0: expected a number above 0"),
        (YARN | {"beta_fast": 1, "beta_slow": 2}, "beta_fast must not be smaller than beta_slow"),
        (YARN | {"rope_theta": 0}, "rope_theta is 0: expected a number above 0"),
        (LLAMA3 | {"high_freq_factor": 1.0}, "high_freq_factor must be larger"),
    ],
)
def test_a_scaling_that_is_refused(key: str, scaling: dict[str, Any], says: str) -> None:
    (problem,) = llama.check(llama.Config(**{key: scaling}))
    assert problem[0] == key
    assert says in problem[1]


def test_sizes_that_no_scaling_can_take() -> None:
    assert "rope_type is missing" in llama.check(llama.Config(rope_scaling={"factor": 2}))[0][1]
    assert "above 1" in llama.check(llama.Config(rope_theta=1.0, rope_scaling=YARN))[0][1]
    assert "at least 4 features" in llama.check(llama.Config(head_dim=2, rope_scaling=SCALINGS["dynamic"]))[0][1]
