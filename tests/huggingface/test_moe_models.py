"""Models against transformers' own classes: names, logits, training steps, config.json in and out."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from meshtrain.config import Config
from meshtrain.config.locate import model_file
from meshtrain.errors import InputError
from meshtrain.huggingface.load import check_weights, load_weights, open_folder
from meshtrain.job.environment import read_environment
from meshtrain.job.process import Job
from meshtrain.layout import Layout
from meshtrain.mesh import build_mesh
from meshtrain.modeling.build import parameter_count, plain_model
from meshtrain.run.weights_export import export

TOKENS = torch.randint(96, (3, 24), generator=torch.Generator().manual_seed(0))
SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
GLM = SIZES | {
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "head_dim": 16,
}
DEEPSEEK = GLM | {
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 6,
    "initializer_range": 0.2,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 500.0, "original_max_position_embeddings": 16}
QWEN = SIZES | {"head_dim": 16}
QWEN_MOE = QWEN | {"moe_intermediate_size": 20, "num_experts": 6, "num_experts_per_tok": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", QWEN),
    "qwen3, tied, yarn": ("qwen3", QWEN | {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen3_moe": ("qwen3_moe", QWEN_MOE | {"norm_topk_prob": True}),
    "qwen3_moe, few layers": (
        "qwen3_moe",
        QWEN_MOE | {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
    ),
    "mixtral": ("mixtral", SIZES | {"num_local_experts": 5}),
    "mixtral, top 1, tied": (
        "mixtral",
        SIZES | {"num_local_experts": 6, "num_experts_per_tok": 1, "tie_word_embeddings": True, "head_dim": 8},
    ),
    "mixtral, window": (
        "mixtral",
        SIZES
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 3,
            "sliding_window": 5,
            "rope_parameters": YARN,
            "head_dim": 12,
        },
    ),
    "glm": ("glm4_moe", GLM | {"attention_bias": True, "use_qk_norm": True, "first_k_dense_replace": 1}),
    "glm, no norm": (
        "glm4_moe",
        GLM
        | {"attention_bias": True, "first_k_dense_replace": 2, "norm_topk_prob": False, "routed_scaling_factor": 0.7},
    ),
    "glm, yarn": (
        "glm4_moe",
        GLM
        | {"first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "use_qk_norm": True}
        | {"rope_parameters": YARN | {"partial_rotary_factor": 0.25}},
    ),
    "deepseek": ("deepseek_v3", DEEPSEEK | {"rms_norm_eps": 1e-2}),
    "deepseek, no query latent": (
        "deepseek_v3",
        DEEPSEEK
        | {"q_lora_rank": None, "rope_interleave": False, "norm_topk_prob": False, "n_group": 1, "topk_group": 1},
    ),
    "deepseek, yarn": ("deepseek_v3", DEEPSEEK | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}}),
    "deepseek, tied": (
        "deepseek_v3",
        DEEPSEEK | {"first_k_dense_replace": 2, "tie_word_embeddings": True, "rope_parameters": YARN},
    ),
}


def transformers_model(name: str) -> nn.Module:
    """With norms, biases and corrections that are not those of a new model."""
    kind, keys = MODELS[name]
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **keys), attn_implementation="sdpa").eval()
    with torch.no_grad():
        for part, tensor in (*model.named_parameters(), *model.named_buffers()):
            if part.endswith(("norm.weight", "_proj.bias")):
                tensor.uniform_(0.5, 1.5)
            elif part.endswith("e_score_correction_bias"):
                tensor.uniform_(-0.2, 0.2)
    return model


def run_config(folder: Path, name: str, *overrides: str) -> Config:
    """A run of the model that a config.json in `folder` describes."""
    text = f"model: {{name: {MODELS[name][0]}, weights: {folder}}}\nbatch: {{global_size: 4, micro_size: 4}}\n"
    (folder / "run.yaml").write_text(text + "train: {steps: 2}\ndata: {seq_len: 32, workers: 0}\n")
    return Config.load(str(folder / "run.yaml"), overrides)


def with_weights(config: Config) -> nn.Module:
    """Our model of a run, with the weights of its files."""
    model = plain_model(config).to_empty(device="cpu")
    if config.model.keys["tie_word_embeddings"]:
        model.lm_head.weight = model.model.embed_tokens.weight  # to_empty parts them
    for name, parameter in model.named_parameters():
        if name.endswith(".loads"):
            parameter.data.zero_()
    with open_folder(config.model.weights) as source:
        load_weights(model, source)
    return model


def with_weights_in_memory(folder: Path, name: str, theirs: nn.Module) -> nn.Module:
    """Our model of a config.json, with weights of a model of transformers, whose names are the same."""
    terms = ["model.router_aux_loss_coef=0"] * ("router_aux_loss_coef" in run_config(folder, name).model.keys)
    config = run_config(folder, name, *terms)
    module = model_file(config.model.name)
    model = module.Model(module.Config(**config.model.keys))
    loads = {key: value for key, value in model.state_dict().items() if key.endswith(".mlp.gate.balance.loads")}
    model.load_state_dict(theirs.state_dict() | loads)
    return model


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        output = model(TOKENS)
    return output if isinstance(output, Tensor) else output.logits


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_transformers_is_read_and_written(name: str, tmp_path: Path) -> None:
    theirs = transformers_model(name)
    theirs.save_pretrained(tmp_path / "in")
    config = run_config(tmp_path / "in", name)
    ours = with_weights(config)
    assert (logits(ours) - logits(theirs)).abs().max() <= 1e-5

    job, mesh = Job(read_environment({}), torch.device("cpu"), None), build_mesh(Layout({}), "cpu")
    module = model_file(config.model.name)
    written = module.to_hugging_face(module.Config(**config.model.keys))
    export(ours, tmp_path / "out", job, mesh, dtype=torch.float32, config=written)
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (logits(again) - logits(theirs)).abs().max() <= 1e-5
    keys = run_config(tmp_path / "out", name).model.keys
    assert module.to_hugging_face(module.Config(**keys)) == written


@pytest.mark.parametrize(
    "name",
    [
        *("qwen3", "qwen3, tied, yarn", "qwen3_moe", "qwen3_moe, few layers", "mixtral", "glm", "glm, no norm"),
        *("deepseek", "deepseek, no query latent", "deepseek, yarn"),
    ],
)
def test_ten_steps_have_the_losses_of_transformers(name: str, tmp_path: Path) -> None:
    """And the names of the parameters are those in its memory."""
    theirs = transformers_model(name).train()
    theirs.config.save_pretrained(tmp_path)
    ours = with_weights_in_memory(tmp_path, name, theirs)
    losses = []
    for model in (ours, theirs):
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
        for _ in range(10):
            output = model(TOKENS[:, :-1])
            output = output if isinstance(output, Tensor) else output.logits
            loss = F.cross_entropy(output.flatten(0, 1), TOKENS[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[:10] == pytest.approx(losses[10:], rel=1e-5)
    assert losses[9] < 0.8 * losses[0]


_WINDOW = {"sliding_window": None, "use_sliding_window": False, "max_window_layers": 28}
_OLDER = {"torch_dtype": "bfloat16", "rope_theta": 5000, "rope_scaling": None}
OLDER = {
    "glm": GLM
    | {"attention_bias": True, "use_qk_norm": True, "partial_rotary_factor": 0.25, "num_nextn_predict_layers": 1},
    "qwen3": QWEN | _WINDOW,
    "qwen3_moe": QWEN_MOE | _WINDOW | {"norm_topk_prob": True, "mlp_only_layers": [], "output_router_logits": False},
}


@pytest.mark.parametrize("name", OLDER)
def test_the_older_form_of_config_json(name: str, tmp_path: Path) -> None:
    """As it lies beside the published weights."""
    keys = OLDER[name] | _OLDER | {"model_type": MODELS[name][0]}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path)).float().eval()
    ours = with_weights_in_memory(tmp_path, name, theirs)
    assert (logits(ours) - logits(theirs)).abs().max() <= 1e-5


@pytest.mark.parametrize(("name", "layer"), [("glm, no norm", 46), ("deepseek", 61)])
def test_the_layer_for_one_token_more_is_not_read(name: str, layer: int, tmp_path: Path) -> None:
    """It stands in the published files behind the other layers; no other layer is passed over."""
    theirs = transformers_model(name)
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {f"model.layers.{layer}.eh_proj.weight": torch.ones(2, 2)}, file, {"format": "pt"})
    config = run_config(tmp_path, name)
    said: list[str] = []
    with open_folder(tmp_path) as source:
        check_weights(plain_model(config), source, say=said.append)
    assert f"1 tensor of model.layers.{layer}.* not read" in said[0]
    assert (logits(with_weights(config)) - logits(theirs)).abs().max() <= 1e-5
    save_file(tensors | {"model.layers.4.eh_proj.weight": torch.ones(2, 2)}, file, {"format": "pt"})
    with pytest.raises(InputError, match=r"the model has no model\.layers\.4\.eh_proj"):
        with_weights(config)


def test_the_share_of_features_that_turn_is_written_for_older_readers_too() -> None:
    glm = model_file("glm4_moe")
    rope = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25}
    assert glm.to_hugging_face(glm.Config(rope_parameters=rope))["partial_rotary_factor"] == 0.25


# Of the published weights: the published numbers, for GLM without the layer that predicts tokens after the next one.
PUBLISHED = {
    "qwen3-0.6b": ("qwen3", 596_049_920),
    "qwen3-1.7b": ("qwen3", 1_720_574_976),
    "qwen3-4b": ("qwen3", 4_022_468_096),
    "qwen3-8b": ("qwen3", 8_190_735_360),
    "qwen3-14b": ("qwen3", 14_768_307_200),
    "qwen3-32b": ("qwen3", 32_762_123_264),
    "qwen3-30b-a3b": ("qwen3_moe", 30_532_122_624),
    "qwen3-235b-a22b": ("qwen3_moe", 235_093_634_560),
    "mixtral-8x7b": ("mixtral", 46_702_792_704),
    "mixtral-8x22b": ("mixtral", 140_620_634_112),
    "glm-4.5": ("glm4_moe", 358_337_791_296 - 5_539_962_272),
    "glm-4.5-air": ("glm4_moe", 110_468_824_832 - 3_616_573_568),
    "deepseek-v3": ("deepseek_v3", 671_026_404_352 + 58 * 256),  # parameters, and corrections of 58 layers
    "moonlight-16b-a3b": ("deepseek_v3", 15_960_110_208),
}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_parameter_counts_are_the_published_ones(preset: str) -> None:
    name, count = PUBLISHED[preset]
    module = model_file(name)
    config = module.Config(**module.presets[preset])
    assert module.check(config) == []
    with torch.device("meta"):
        model = module.Model(config)
    assert parameter_count(model) == count


@pytest.mark.parametrize(
    ("name", "keys", "key", "way_out"),
    [
        (
            "mixtral",
            {"num_experts_per_tok": 9},
            "num_experts_per_tok",
            "9 is more than num_local_experts 8: use at most 8",
        ),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts", "use at least 1"),
        ("mixtral", {"sliding_window": 0}, "sliding_window", "use at least 1"),
        ("mixtral", {"router_aux_loss_coef": -0.1}, "router_aux_loss_coef", "at least 0"),
        ("mixtral", {"num_attention_heads": 3}, "num_attention_heads", "use 2 or 4"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types", "leave layer_types out"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok", "use at most 8"),
        ("qwen3_moe", {"num_local_experts": 1}, "num_experts_per_tok", "2 is more than num_local_experts 1"),
        ("qwen3_moe", {"mlp_only_layers": [0, 1, 2, 3]}, "mlp_only_layers", "use the model qwen3"),
        ("qwen3_moe", {"decoder_sparse_step": 5}, "decoder_sparse_step", "use the model qwen3"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step", "use at least 1"),
        ("glm4_moe", {"n_group": 3}, "n_group", "8 experts do not divide into 3 groups of two or more: use 2 or 4"),
        ("glm4_moe", {"n_group": 8}, "n_group", "use 4"),
        ("glm4_moe", {"num_hidden_layers": 0}, "num_hidden_layers", "use at least 1"),
        ("glm4_moe", {"n_routed_experts": 12, "n_group": 5}, "n_group", "use 4 or 6"),
        (
            "glm4_moe",
            {"n_group": 4, "topk_group": 5},
            "topk_group",
            "topk_group 5 is more than n_group 4: use at most 4",
        ),
        (
            "glm4_moe",
            {"n_group": 4, "topk_group": 1, "num_experts_per_tok": 3},
            "num_experts_per_tok",
            "3 is more than the 2 experts of 1 of 4 groups: use at most 2",
        ),
        ("glm4_moe", {"n_shared_experts": 0}, "n_shared_experts", "use at least 1"),
        ("glm4_moe", {"first_k_dense_replace": 4}, "first_k_dense_replace", "use 0 to 3"),
        ("glm4_moe", {"partial_rotary_factor": 1.5}, "partial_rotary_factor", "at most 1"),
        ("glm4_moe", {"head_dim": 10}, "head_dim", "5 of 10 features turn"),
    ],
)
def test_impossible_mixtures_are_named(name: str, keys: dict[str, Any], key: str, way_out: str) -> None:
    module = model_file(name)
    ((where_from, problem),) = module.check(module.Config(**keys))
    assert where_from == key
    assert way_out in problem
