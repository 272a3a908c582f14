"""Small models of transformers (models.yaml), and the same models of meshtrain with their
weights."""

import json
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor, nn

from meshtrain.config import Config
from meshtrain.huggingface.load import load_weights, open_folder
from meshtrain.job.environment import read_environment
from meshtrain.job.locate import model_file
from meshtrain.job.process import Job
from meshtrain.layout import Layout
from meshtrain.mesh import build_mesh
from meshtrain.modeling.build import plain_model
from meshtrain.run.weights_export import export

JOB = Job(read_environment({}), torch.device("cpu"), None)
MESH = build_mesh(Layout({}), "cpu")  # of a world of one
REST = (
    "\nbatch: {global_size: 4, micro_size: 4}\ntrain: {steps: 2}\ndata: {seq_len: 32, workers: 0}\n"
)
TOKENS = torch.randint(96, (3, 24), generator=torch.Generator().manual_seed(0))


def table(name: str) -> Any:
    return yaml.safe_load((Path(__file__).parent / f"{name}.yaml").read_text())


MODELS: dict[str, dict[str, Any]] = table("models")["models"]


def transformers_model(name: str) -> nn.Module:
    """With norms, biases and corrections that are not those of a new model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    config = AutoConfig.for_model(**MODELS[name])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for part, tensor in (*model.named_parameters(), *model.named_buffers()):
            if part.endswith(("norm.weight", "_proj.bias")):
                tensor.uniform_(0.5, 1.5)
            elif part.endswith("e_score_correction_bias"):
                tensor.uniform_(-0.2, 0.2)
    return model


def run_config(folder: Path, *overrides: str, model: str = "", **options: Any) -> Config:
    """A run that starts from a folder; its model is by default the one that config.json names."""
    model = model or json.loads((folder / "config.json").read_text())["model_type"]
    path = folder.parent / "mine.yaml"
    path.write_text(f"model: {{name: {model}, weights: {folder}}}{REST}")
    return Config.load(str(path), overrides, **options)


def with_weights(config: Config) -> nn.Module:
    """Our model of a run, with the weights of its files."""
    model = plain_model(config).to_empty(device="cpu")
    if config.model.keys.get("tie_word_embeddings"):
        model.lm_head.weight = model.model.embed_tokens.weight  # to_empty parts them
    for name, parameter in model.named_parameters():
        if name.endswith(".loads"):
            parameter.data.zero_()
    with open_folder(config.model.weights) as source:
        load_weights(model, source)
    return model


def logits(model: nn.Module, tokens: Tensor = TOKENS) -> Tensor:
    with torch.no_grad():
        output = model(tokens)
    return output if isinstance(output, Tensor) else output.logits


def write(
    model: nn.Module,
    folder: Path,
    config: Config,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> None:
    """Exports a model of a run."""
    described = model_file(config.model.name).to_hugging_face(model.config)
    export(model, folder, JOB, MESH, dtype=dtype, config=described, **options)


def stored(folder: Path) -> dict[str, Tensor]:
    return {
        name: value
        for path in folder.glob("*.safetensors")
        for name, value in load_file(path).items()
    }


def changed(folder: Path, **keys: Any) -> Path:
    """With these keys in its config.json; None takes a key away."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | keys
    path.write_text(
        json.dumps({key: value for key, value in config.items() if value is not None}, indent=2)
    )
    return folder


def assert_loads(folder: Path, expected: Tensor, tokens: Tensor = TOKENS) -> nn.Module:
    """transformers finds all tensors of a model in a folder, and computes the same."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype="auto"
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (logits(model.eval().float(), tokens) - expected).abs().max() <= 1e-5
    return model
