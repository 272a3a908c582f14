"""Layers that predict further tokens, in files as they are published, against transformers' own
reading of them."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from meshtrain.cli import main as cli
from meshtrain.config import Config
from meshtrain.data.batch import Batch
from meshtrain.errors import InputError
from meshtrain.huggingface.adapter import adapter_source
from meshtrain.huggingface.load import WeightSource, named_tensors
from meshtrain.huggingface.safetensors import SINGLE, Entry
from meshtrain.modeling.build import build_model, check_first_values
from meshtrain.parallel.predictions import Predictions
from meshtrain.parallel.step_context import StepContext, use_context
from meshtrain.run.results import write_export
from tests.checkpoint.by_hand import write_checkpoint
from tests.huggingface.models import (
    JOB,
    MESH,
    TOKENS,
    changed,
    logits,
    run_config,
    stored,
    transformers_model,
    with_weights,
    write,
)

LAYERS, DEPTHS = 3, 2
# What the files of DeepSeek-V3 and GLM-4.5 have of such a layer beside what others have.
PUBLISHED = {
    *("embed_tokens.weight", "enorm.weight", "hnorm.weight", "eh_proj.weight"),
    *("shared_head.norm.weight", "shared_head.head.weight"),
}


def with_predictions(name: str, folder: Path) -> nn.Module:
    """Writes a model of transformers and, as published, prediction layers with weights of their
    own. Returns ours."""
    transformers_model(name).save_pretrained(folder / "main")
    config = run_config(folder / "main")
    assert config.model.keys["num_nextn_predict_layers"] == 0, "transformers leaves them out"
    main = with_weights(config)
    config = run_config(folder / "main", f"model.num_nextn_predict_layers={DEPTHS}")
    torch.manual_seed(0)
    model = type(main)(type(main.config)(**config.model.keys))
    with torch.no_grad():
        for part, tensor in model.named_parameters():
            if part in dict(main.named_parameters()):
                tensor.copy_(main.get_parameter(part))
            elif part.endswith("norm.weight"):
                tensor.uniform_(0.5, 1.5)
    write(model, folder / "in", config)
    return model


def own_model(config: Config) -> nn.Module:
    """As a run builds it, with the weights of its files."""
    return build_model(config, MESH, torch.device("cpu")).eval()


def losses_of(model: nn.Module) -> list[float]:
    """The mean loss of each depth."""
    batch = Batch.of((TOKENS[:, :-1], None, None), TOKENS[:, 1:]).looking_ahead(DEPTHS)
    sums: dict[int, float] = {}

    def take(depth: int, total: Tensor, count: Tensor) -> None:
        sums[depth] = (total / count).item()

    predictions = Predictions(lambda: batch.ahead, take=take)
    with torch.no_grad(), use_context(StepContext(predictions=predictions)):
        model(TOKENS[:, :-1])
    return [sums[depth] for depth in sorted(sums)]


def losses_of_transformers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    from transformers import AutoModelForCausalLM
    from transformers.modeling_layers import MtpModel

    main = AutoModelForCausalLM.from_pretrained(folder).eval()
    # The class names the layers of the published models, by their number.
    ours = [rf"model\.layers\.{LAYERS + k}\." for k in range(DEPTHS)]
    monkeypatch.setattr(type(main), "_keys_to_ignore_on_load_unexpected", ours)
    main, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    predictions = MtpModel.from_pretrained(main.eval()).eval()
    means = []
    with torch.no_grad():
        h = main.model(TOKENS[:, :-1]).last_hidden_state
        for k in range(1, DEPTHS + 1):
            ids = TOKENS[:, k:-1]
            positions = torch.arange(k, k + ids.shape[1])[None]
            h = predictions.forward_layer(k - 1, h[:, : ids.shape[1]], positions, None, ids)
            predicted = main.lm_head(h)
            means.append(F.cross_entropy(predicted.flatten(0, 1), TOKENS[:, k + 1 :].flatten()))
    return [mean.item() for mean in means]


@pytest.mark.parametrize("name", ["glm", "deepseek", "deepseek, tied"])
def test_transformers_reads_the_same_predictions(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Name for name what is published, and each depth has the loss that transformers' own class
    has."""
    model = with_predictions(name, tmp_path)
    written = stored(tmp_path / "in")
    for layer in range(LAYERS, LAYERS + DEPTHS):
        ahead = f"model.layers.{layer}."
        as_others = f"model.layers.{LAYERS - 1}."
        names = {part.removeprefix(ahead) for part in written if part.startswith(ahead)}
        others = {part.removeprefix(as_others) for part in written if part.startswith(as_others)}
        assert names == PUBLISHED | others
    described = json.loads((tmp_path / "in" / "config.json").read_text())
    assert described["num_nextn_predict_layers"] == DEPTHS

    expected = losses_of_transformers(tmp_path / "in", monkeypatch)
    assert losses_of(model) == pytest.approx(expected, rel=1e-5)
    again = own_model(run_config(tmp_path / "in"))
    assert losses_of(again) == pytest.approx(expected, rel=1e-5)
    assert (logits(again) - logits(model)).abs().max() <= 1e-6
    write(again, tmp_path / "out", run_config(tmp_path / "in"))
    for part, value in stored(tmp_path / "out").items():
        assert torch.equal(value, written[part]), part


def test_the_embedding_and_the_head_may_be_left_out_and_may_not_differ(tmp_path: Path) -> None:
    """As in GLM-4.6, whose files have them once."""
    model = with_predictions("glm", tmp_path)
    file = tmp_path / "in" / SINGLE
    tensors = load_file(file)
    head = f"model.layers.{LAYERS}.shared_head.head.weight"
    embedding = f"model.layers.{LAYERS}.embed_tokens.weight"
    once = {part: value for part, value in tensors.items() if part not in (head, embedding)}
    save_file(once, file, {"format": "pt"})
    assert losses_of(own_model(run_config(tmp_path / "in"))) == losses_of(model)
    for part in (head, embedding):
        save_file(tensors | {part: tensors[part] + 1}, file, {"format": "pt"})
        with pytest.raises(InputError, match=r"leave them out by model\.num_nextn_predict_layers"):
            own_model(run_config(tmp_path / "in"))


def test_what_the_files_have_of_them_is_built(tmp_path: Path) -> None:
    """And what the run says is built, or said to be missing."""
    with_predictions("deepseek", tmp_path)
    folder = tmp_path / "in"
    assert run_config(folder).model.keys["num_nextn_predict_layers"] == DEPTHS
    with pytest.raises(InputError, match=r"num_nextn_predict_layers \(there 2, here 0\)"):
        check_first_values(run_config(folder, "model.num_nextn_predict_layers=0"))
    with pytest.raises(InputError, match=r"missing model\.layers\.5\.enorm\.weight"):
        check_first_values(run_config(folder, "model.num_nextn_predict_layers=3"))
    changed(folder, num_nextn_predict_layers=1)
    assert run_config(folder).model.keys["num_nextn_predict_layers"] == 1


def test_adapters_of_these_layers_are_in_no_file_for_peft(tmp_path: Path) -> None:
    """transformers' classes, to which peft adds adapters, have no such layers."""
    shape = (2, 4)
    tensors = {
        f"{layer}.lora_A.weight": Entry(f"{layer}.lora_A.weight", "F32", shape)
        for layer in ("model.layers.0.mlp.up_proj", "mtp.0.layer.eh_proj")
    }
    source = WeightSource(tmp_path, tensors, keys=dict, read=lambda name, part: torch.ones(shape))
    assert list(adapter_source(source).entries) == [
        "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
    ]


def test_a_checkpoint_becomes_the_same_files(tmp_path: Path) -> None:
    model = with_predictions("glm", tmp_path)
    config = run_config(tmp_path / "in")
    checkpoint = write_checkpoint(
        tmp_path / "checkpoints",
        {f"model.{names[0]}": tensor.detach() for names, tensor in named_tensors(model).items()},
        config=config.plain(),
    )
    assert cli.main(["export", str(checkpoint), str(tmp_path / "ours")]) == 0
    write_export(config, JOB, MESH, model, str(tmp_path / "run"))
    files = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "ours").iterdir()} == files
