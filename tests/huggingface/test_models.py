"""Models against transformers' own classes: names, logits, training steps, config.json in and
out."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from meshtrain.errors import InputError
from meshtrain.huggingface.safetensors import INDEX, SINGLE
from meshtrain.job.locate import model_file
from meshtrain.modeling.build import check_first_values, parameter_count
from tests.huggingface.models import (
    MODELS,
    TOKENS,
    assert_loads,
    logits,
    run_config,
    stored,
    table,
    transformers_model,
    with_weights,
    write,
)

PUBLISHED, CONFIGS, OLDER = (
    table("published"),
    table("deepseek_configs"),
    table("models")["older_models"],
)


MIXTURES = [name for name, keys in MODELS.items() if any("experts" in key for key in keys)]


@pytest.mark.parametrize(
    ("name", "fused"),
    [*[(name, False) for name in MODELS], *[(name, True) for name in MIXTURES]],
)
def test_a_model_of_transformers_is_read_and_written(
    name: str, fused: bool, tmp_path: Path
) -> None:
    """From several files and to one, which has the tensors of the published files. `fused`: the
    experts of a layer are one tensor in the files that are read."""
    theirs = transformers_model(name)
    theirs.save_pretrained(tmp_path / "published")
    theirs.save_pretrained(tmp_path / "in", max_shard_size="40KB", save_original_format=not fused)
    assert (tmp_path / "in" / INDEX).exists()
    config = run_config(tmp_path / "in")
    ours, expected = with_weights(config), logits(theirs)
    assert (logits(ours) - expected).abs().max() <= 1e-5

    write(ours, tmp_path / "out", config)
    assert not (tmp_path / "out" / INDEX).exists()
    written, published = stored(tmp_path / "out"), stored(tmp_path / "published")
    assert written.keys() == published.keys()
    assert all(torch.equal(value, published[key]) for key, value in written.items())
    assert_loads(tmp_path / "out", expected)
    again = run_config(tmp_path / "out")
    assert (logits(with_weights(again)) - expected).abs().max() <= 1e-5
    module = model_file(config.model.name)
    described = (
        module.to_hugging_face(module.Config(**read.model.keys)) for read in (config, again)
    )
    assert next(described) == next(described)


def with_weights_in_memory(folder: Path, theirs: nn.Module) -> nn.Module:
    """Our model of a config.json, with weights of a model of transformers, whose names are the
    same."""
    config = run_config(folder)
    # A config.json of transformers names prediction layers, which are not in its model.
    without = {"router_aux_loss_coef", "num_nextn_predict_layers"} & config.model.keys.keys()
    if without:
        config = run_config(folder, *[f"model.{key}=0" for key in without])
    module = model_file(config.model.name)
    model = module.Model(module.Config(**config.model.keys))
    loads = {
        key: value
        for key, value in model.state_dict().items()
        if key.endswith(".mlp.gate.balance.loads")
    }
    model.load_state_dict(theirs.state_dict() | loads)
    return model


@pytest.mark.parametrize(
    "name",
    [
        *(
            "qwen3",
            "qwen3, tied, yarn",
            "qwen3_moe",
            "qwen3_moe, few layers",
            "glm",
            "glm, no norm",
        ),
        *("deepseek", "deepseek, no query latent", "deepseek, yarn"),
    ],
)
def test_ten_steps_have_the_losses_of_transformers(name: str, tmp_path: Path) -> None:
    """And the names of the parameters are those in its memory."""
    theirs = transformers_model(name).train()
    theirs.config.save_pretrained(tmp_path / "in")
    losses = []
    for model in (with_weights_in_memory(tmp_path / "in", theirs), theirs):
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


@pytest.mark.parametrize("name", OLDER)
def test_the_older_form_of_config_json(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "config.json").write_text(json.dumps(OLDER[name]))
    theirs = (
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "in")).float().eval()
    )
    assert (
        logits(with_weights_in_memory(tmp_path / "in", theirs)) - logits(theirs)
    ).abs().max() <= 1e-5


@pytest.mark.parametrize(("name", "layer"), [("glm, no norm", 46), ("deepseek", 61)])
def test_the_layer_for_one_token_more_is_not_read(name: str, layer: int, tmp_path: Path) -> None:
    """It stands in the published files behind the other layers; no other layer is passed over."""
    theirs = transformers_model(name)
    theirs.save_pretrained(tmp_path / "in")
    config, messages = run_config(tmp_path / "in"), list[str]()
    check_first_values(config, say=messages.append)
    assert messages == []
    file = tmp_path / "in" / SINGLE
    tensors = load_file(file)
    save_file(
        tensors | {f"model.layers.{layer}.eh_proj.weight": torch.ones(2, 2)}, file, {"format": "pt"}
    )
    check_first_values(config, say=messages.append)
    assert messages == [
        f"{tmp_path / 'in'}: 1 tensor of model.layers.{layer}.* not read: the model has none of it"
    ]
    assert (logits(with_weights(config)) - logits(theirs)).abs().max() <= 1e-5
    save_file(tensors | {"model.layers.4.eh_proj.weight": torch.ones(2, 2)}, file, {"format": "pt"})
    with pytest.raises(InputError, match=r"the model has no model\.layers\.4\.eh_proj"):
        with_weights(config)


def test_the_share_of_features_that_turn_is_written_for_older_readers_too() -> None:
    glm = model_file("glm4_moe")
    rope = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25}
    assert glm.to_hugging_face(glm.Config(rope_parameters=rope))["partial_rotary_factor"] == 0.25


@pytest.mark.parametrize("preset", PUBLISHED)
def test_presets_are_the_published_models(preset: str, tmp_path: Path) -> None:
    """By the number of their values and, where one is at hand, by their config.json."""
    module = model_file(PUBLISHED[preset]["model"])
    config = module.Config(**module.presets[preset])
    assert module.check(config) == []
    with torch.device("meta"):
        assert parameter_count(module.Model(config)) == PUBLISHED[preset]["values"]
    if preset in CONFIGS:
        (tmp_path / "in").mkdir()
        (tmp_path / "in" / "config.json").write_text(json.dumps(CONFIGS[preset]))
        # Presets are without the layers that predict further tokens.
        keys = run_config(tmp_path / "in", "model.num_nextn_predict_layers=0").model.keys
        assert module.to_hugging_face(module.Config(**keys)) == module.to_hugging_face(config)


def test_sizes_and_scalings_that_make_no_model_are_refused() -> None:
    for row in table("refused_keys"):
        keys, module = row["keys"], model_file(row["model"])
        forms = [keys]
        if len(keys) == 1 and "rope_scaling" in keys:
            forms.append({"rope_parameters": keys["rope_scaling"]})
        for form in forms:
            ((key, problem),) = module.check(module.Config(**form))
            assert (key, row["says"] in problem) == (row.get("key", list(form)[-1]), True), (
                row,
                problem,
            )
    llama = model_file("llama")
    assert "rope_type is missing" in llama.check(llama.Config(rope_scaling={"factor": 2}))[0][1]
