"""The config.json files beside published weights of DeepSeek's architecture, and keys that make no such model."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshtrain.config import Config
from meshtrain.config.locate import model_file

deepseek = model_file("deepseek_v3")
# What both have, and what only their authors' code reads.
COMMON: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "kv_lora_rank": 512,
    "model_type": "deepseek_v3",
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.46.3",
    "use_cache": True,
    "v_head_dim": 128,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek-v3": {
        "first_k_dense_replace": 3,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "topk_group": 4,
        "vocab_size": 129280,
    },
    "moonlight-16b-a3b": {
        "aux_loss_alpha": 0.001,
        "first_k_dense_replace": 1,
        "hidden_size": 2048,
        "intermediate_size": 11264,
        "max_position_embeddings": 8192,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "num_nextn_predict_layers": 0,
        "pretraining_tp": 1,
        "q_lora_rank": None,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.446,
        "seq_aux": True,
        "topk_group": 1,
        "vocab_size": 163840,
    },
}


def load(folder: Path, **keys: Any) -> Config:
    (folder / "config.json").write_text(json.dumps(keys, indent=2))
    text = f"model: {{name: deepseek_v3, weights: {folder}}}\nbatch: {{global_size: 4, micro_size: 4}}\n"
    (folder / "run.yaml").write_text(text + "train: {steps: 2}\ndata: {seq_len: 32, workers: 0}\n")
    return Config.load(str(folder / "run.yaml"), ())


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_preset_is_what_the_published_config_json_says(preset: str, tmp_path: Path) -> None:
    published = deepseek.Config(**load(tmp_path, **COMMON, **PUBLISHED[preset]).model.keys)
    own = deepseek.Config(**deepseek.presets[preset])
    assert deepseek.to_hugging_face(published) == deepseek.to_hugging_face(own)


@pytest.mark.parametrize(
    ("keys", "key", "way_out"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads", "makes a key of each of the 8 heads: use null"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim", "qk_rope_head_dim 7 is odd: use 8"),
        ({"q_lora_rank": 0}, "q_lora_rank", "use at least 1"),
        ({"first_k_dense_replace": 4}, "first_k_dense_replace", "use 0 to 3"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling", "needs the numbers factor"),
    ],
)
def test_impossible_sizes_are_named(keys: dict[str, Any], key: str, way_out: str) -> None:
    ((named, problem),) = deepseek.check(deepseek.Config(**keys))
    assert named == key
    assert way_out in problem
