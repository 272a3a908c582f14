"""Models that were files of meshtrain once: a config is told what replaces them, and their
checkpoints are read."""

from pathlib import Path

import pytest
import torch

from meshtrain.cli import main as cli
from meshtrain.config import Config
from meshtrain.config.errors import ConfigErrors
from meshtrain.huggingface.former_models import FORMER_MODELS
from meshtrain.modeling.build import build_model
from tests.checkpoint.by_hand import write_checkpoint
from tests.huggingface.models import MESH, REST, assert_loads, logits

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 5,
    "max_position_embeddings": 64,
    "rope_theta": 500.0,
}
# As our Mixtral's file wrote it.
FORMER = SIZES | {
    "name": "mixtral",
    "num_key_value_heads": None,
    "head_dim": None,
    "rope_scaling": None,
    "rope_parameters": None,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "hidden_dropout": 0.0,
    "router_balance": "batch",
    "router_z_loss_coef": 0.0,
}


def their_model() -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model("mixtral", **SIZES, num_key_value_heads=4)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(params=[0.0, 0.02], ids=["no balance", "balance"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint of our Mixtral, with the loads of its routers."""
    tensors = dict(their_model().state_dict())
    for layer in range(SIZES["num_hidden_layers"]):
        tensors[f"model.layers.{layer}.mlp.gate.balance.loads"] = torch.arange(5.0)
    return write_checkpoint(
        tmp_path / "checkpoints",
        {f"model.{name}": tensor for name, tensor in tensors.items()},
        config={
            "model": FORMER | {"router_aux_loss_coef": request.param},
            "train": {"precision": "float32"},
        },
    )


def test_a_config_is_told_what_replaces_a_model(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"model: {{name: mixtral, hidden_size: 32}}{REST}")
    with pytest.raises(ConfigErrors) as refused:
        Config.load(str(file))
    (error,) = refused.value.errors
    assert error.message == (
        f"model.name: mixtral is no longer a model here: {FORMER_MODELS['mixtral']}"
    )


def test_a_run_starts_from_a_checkpoint_of_a_former_model(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"model: {{name: transformers, weights: {checkpoint}}}{REST}")
    model = build_model(Config.load(str(file)), MESH, torch.device("cpu")).eval()
    tokens = torch.arange(48).view(2, 24)
    torch.testing.assert_close(logits(model, tokens), logits(their_model(), tokens))


def test_a_checkpoint_of_a_former_model_is_exported(checkpoint: Path, tmp_path: Path) -> None:
    assert cli.main(["export", str(checkpoint), str(tmp_path / "out")]) == 0
    tokens = torch.arange(48).view(2, 24)
    assert_loads(tmp_path / "out", logits(their_model(), tokens), tokens)
