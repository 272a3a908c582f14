"""Classes of transformers, trained by `model: {name: transformers}`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file

from meshtrain.config import Config, ConfigErrors
from meshtrain.config.model_spec import model_spec
from meshtrain.job.locate import model_file
from meshtrain.metrics.logger import read
from tests.huggingface.beside_own_loop import BATCH, CLIP, LR, SEED, STEPS
from tests.launching import forked

PROGRAM = Path(__file__).with_name("beside_own_loop.py")
SIZES = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
FEW_HEADS = SIZES | {"intermediate_size": 96, "num_key_value_heads": 2, "pad_token_id": None}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": FEW_HEADS,
    "gpt2": {"vocab_size": 64, "n_embd": 64, "n_layer": 2, "n_head": 4, **NO_DROPOUT},
    # soft caps, a window in every second layer, a scaled and tied embedding
    "gemma2": FEW_HEADS | {"head_dim": 16, "sliding_window": 8},
    "mistral": FEW_HEADS | {"sliding_window": 8},
    "qwen2": FEW_HEADS,
    "qwen3": FEW_HEADS | {"head_dim": 16},
    "phi3": FEW_HEADS,
    "olmo2": FEW_HEADS,
    "gpt_neox": SIZES | {"intermediate_size": 96, "pad_token_id": None},
    "falcon": SIZES | {"attention_dropout": 0.0, "hidden_dropout": 0.0, "pad_token_id": None},
    "mixtral": FEW_HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "mamba": {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
}


def config_of(folder: Path, **model: Any) -> Path:
    """The config of a run."""
    file = folder / "config.yaml"
    sections = {
        "model": {"name": "transformers", **model},
        "data": {"source": str(PROGRAM), "seq_len": 20},
        "batch": {"global_size": BATCH, "micro_size": 2},
        "optimizer": {"lr": LR, "schedule": "constant", "warmup_steps": 0, "clip_norm": CLIP},
        "train": {
            "steps": STEPS,
            "seed": SEED,
            "precision": "float64",
            "eval_every": 0,
            "output": str(folder / "run"),
        },
        "checkpoint": {"every": 0},
    }
    file.write_text(yaml.safe_dump(sections))
    return file


def save_pretrained(folder: Path, family: str) -> None:
    """Weights as published ones lie in a folder, drawn anew, of a tiny model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **FAMILIES[family])
    AutoModelForCausalLM.from_config(config, dtype=torch.float64).save_pretrained(folder)


@pytest.mark.parametrize(
    ("family", "processes", "layout"),
    [
        ("gemma2", 2, "{dp_shard: 2}"),
        ("mixtral", 2, "{tp: 2}"),
        *[
            pytest.param(family, 1, "{dp_shard: 1}", marks=pytest.mark.slow)
            for family in FAMILIES
            if family not in ("gemma2", "mixtral")
        ],
    ],
)
def test_ten_steps_are_those_of_the_class_in_a_loop_of_its_own(
    family: str, processes: int, layout: str, tmp_path: Path
) -> None:
    weights = tmp_path / "weights"
    save_pretrained(weights, family)
    config = config_of(tmp_path, weights=str(weights))
    export = tmp_path / "export"
    forked(
        processes, PROGRAM, weights, config, f"layout={layout}", f"train.export={export}"
    ).check()

    rows = read(tmp_path / "run/metrics.jsonl")
    own = json.loads((weights / "own.json").read_text())
    assert len(rows) == len(own) == STEPS
    for row, (loss, norm) in zip(rows, own, strict=True):
        assert row["loss"] == pytest.approx(loss, rel=1e-9)
        assert row["grad_norm"] == pytest.approx(norm, rel=1e-9)
    assert_loads(export, weights)
    assert own[-1][0] < 0.9 * own[0][0], "a model that does not move would agree with anything"


def assert_loads(export: Path, weights: Path) -> None:
    """The export is what `from_pretrained` loads, with the names of the folder it came from."""
    from transformers import AutoModelForCausalLM

    _, report = AutoModelForCausalLM.from_pretrained(export, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    names = [
        {name for file in folder.glob("*.safetensors") for name in load_file(file)}
        for folder in (export, weights)
    ]
    assert names[0] == names[1]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({}, "give `path`, a folder with a config.json, or `model_type`"),
        ({"model_type": "lama"}, "transformers has no model_type lama: did you mean llama?"),
        (
            {"model_type": "llama", "config": {"hiden_size": 64}},
            "LlamaConfig has no key hiden_size: did you mean hidden_size?",
        ),
        (
            {"model_type": "gemma3"},
            "gemma3 is made of several models (text_config, vision_config): take the model_type of "
            "its text model, gemma3_text",
        ),
        ({"model_type": "emu3"}, "take the model_type of its text model, emu3_text_model"),
        ({"model_type": "musicgen"}, "has none of them as a causal language model: take another"),
        ({"model_type": "t5"}, "transformers has no causal language model of the type t5"),
        ({"path": "nowhere"}, "nowhere/config.json cannot be read: "),
        (
            {"model_type": "opt", "config": SIZES | {"dropout": 0.1}},
            "would depend on the layout: set dropout to 0",
        ),
        (
            {"model_type": "phimoe", "config": FEW_HEADS},
            "the class draws random numbers in its forward (uniform_), which would depend on the",
        ),
        (
            {"model_type": "bert", "config": SIZES},
            "an encoder by default is a language model with is_decoder: true",
        ),
    ],
)
def test_a_wrong_model_is_refused(model: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigErrors) as refused:
        Config.load(str(config_of(tmp_path, **model)), [], world_size=1, for_training=True)
    assert said in str(refused.value)


@pytest.mark.parametrize("key", ["path", "weights"])
def test_a_config_json_is_taken_in(key: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "llama",
                "architectures": ["LlamaForCausalLM"],
                "torch_dtype": "bfloat16",
                "rope_theta": 500.0,
                "_name_or_path": "somewhere",
                **FEW_HEADS,
            }
        )
    )
    file = config_of(tmp_path, config={"hidden_size": 32}, **{key: str(tmp_path)})
    keys = Config.load(str(file), [], world_size=1).model.keys
    assert keys["path"] is None, "a checkpoint says all of its model"
    assert keys["model_type"] == "llama"
    assert keys["vocab_size"] == 64
    assert keys["config"]["hidden_size"] == 32
    assert keys["config"]["rope_parameters"]["rope_theta"] == 500.0
    assert not keys["config"].keys() & {"architectures", "dtype", "torch_dtype", "_name_or_path"}


def test_plans_fit_a_model_of_fewer_layers(tmp_path: Path) -> None:
    """As foresight makes one, which counts layers of a kind once."""
    keys = FAMILIES["mixtral"]
    spec = model_spec("transformers", {"model_type": "mixtral", "config": keys})
    assert spec.plan("cp_plan") == {"model.layers.*.self_attn": "attention"}
    assert spec.plan("ep_plan") == {"model.layers.*.mlp.experts": "ep_dispatch_experts"}
    # Every second layer of this family attends, and the others mix tokens otherwise.
    lfm2 = {**FEW_HEADS, "layer_types": ["conv", "full_attention"]}
    spec = model_spec("transformers", {"model_type": "lfm2", "config": lfm2})
    assert spec.plan("cp_plan") == {"model.layers.*.self_attn": "attention"}
    assert not hasattr(spec.meta.model.layers[0], "self_attn")


@pytest.mark.parametrize(("given", "named"), [((None, 0.1), {}), ((), {"dropout_p": 0.1})])
def test_dropout_of_attention_is_seen_by_position_and_by_name(
    given: tuple[Any, ...], named: dict[str, float]
) -> None:
    module: Any = model_file("transformers")
    q = torch.zeros(1, 1, 2, 4)
    with module._Drops() as drops:
        F.scaled_dot_product_attention(q, q, q)
        assert not drops.found
        F.scaled_dot_product_attention(q, q, q, *given, **named)
    assert drops.found
