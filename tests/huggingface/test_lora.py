"""Fine-tuning: what is frozen stays, adapters go on with the same bits, and are exported merged and
for peft."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from meshtrain.checkpoint.directory import read_manifest
from meshtrain.checkpoint.weights import load_weights, open_checkpoint
from meshtrain.cli import main as cli
from meshtrain.cli.plan import make_plan
from meshtrain.config import Config
from meshtrain.data.custom import CustomSamples
from meshtrain.errors import InputError
from meshtrain.layout import Layout
from meshtrain.mesh import build_mesh
from meshtrain.metrics.logger import read
from meshtrain.modeling.build import (
    build_model,
    check_first_values,
    check_start,
    plain_model,
    spec_of,
)
from meshtrain.parallel.linear.lora import adapted_layers, add_adapters, is_adapter, merge_adapters
from tests.huggingface.models import REST, assert_loads, logits, transformers_model
from tests.launching import forked

LORA = "train.lora={rank: 4, alpha: 16, dropout: 0.1}"
LAST = "checkpoints/step_0000004"


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a `base` of transformers, and runs over tp from it: `whole` of four steps,
    exported to `merged`, and `resumed` from its second."""
    folder = tmp_path_factory.mktemp("tuned")
    transformers_model("gqa").save_pretrained(folder / "base")
    (folder / "mine.yaml").write_text(f"model: {{weights: {folder / 'base'}}}{REST}")
    common = [
        LORA,
        "layout={tp: 2}",
        "train.steps=4",
        "optimizer.lr=0.02",
        "optimizer.warmup_steps=0",
    ]
    common += [
        "train.sample_tokens=0",
        "train.eval_every=0",
        "checkpoint.every=2",
        "parallel.verify=false",
    ]
    whole = [f"train.output={folder / 'whole'}", f"train.export={folder / 'merged'}"]
    resumed = [
        f"train.output={folder / 'resumed'}",
        f"checkpoint.resume={folder / 'whole/checkpoints/step_0000002'}",
    ]
    for options in (whole, resumed):
        forked(2, "-m", "meshtrain.train", folder / "mine.yaml", *common, *options).check()
    return folder


@pytest.fixture(scope="module")
def config(tuned: Path) -> Config:
    return Config.load(str(tuned / "mine.yaml"), [LORA])


def stored(checkpoint: Path) -> dict[str, torch.Tensor]:
    with open_checkpoint(checkpoint) as source:
        return {
            name: source.read(name, tuple(slice(0, n) for n in e.shape))
            for name, e in source.entries.items()
        }


def test_adapters_alone_change_and_go_on_with_the_same_bits(tuned: Path) -> None:
    base = load_file(tuned / "base/model.safetensors")
    whole, resumed = stored(tuned / "whole"), stored(tuned / "resumed")
    assert {name for name in whole if not is_adapter(name)} == base.keys()
    assert all(torch.equal(whole[name], base[name]) for name in base)
    adapters = [name for name in whole if is_adapter(name)]
    assert len(adapters) == 2 * 7 * 2, (
        "A and B of the seven linear layers of two layers, and none of the head"
    )
    assert all(whole[name].abs().max() > 0 for name in adapters)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    losses = [
        [row["loss"] for row in read(tuned / name / "metrics.jsonl")]
        for name in ("whole", "resumed")
    ]
    assert losses[0][2:] == losses[1]
    names = read_manifest(tuned / "whole" / LAST)[0].tensors
    states = {name.removeprefix("optimizer.").rpartition(".")[0] for name in names}
    assert {
        name for name in states if name.endswith("weight") and "model.model." not in name
    } == set(adapters)


def test_merged_by_a_run_and_by_the_command(tuned: Path, config: Config) -> None:
    """And by the model itself, which computes the same as before."""
    assert cli.main(["export", str(tuned / "whole"), str(tuned / "again")]) == 0
    by_run, by_command = (
        load_file(tuned / name / "model.safetensors") for name in ("merged", "again")
    )
    assert by_run.keys() == by_command.keys() == load_file(tuned / "base/model.safetensors").keys()
    assert all(torch.equal(by_run[name], by_command[name]) for name in by_run)
    model = build_model(config, build_mesh(Layout({}), "cpu"), torch.device("cpu")).eval()
    base = logits(assert_loads(tuned / "base", logits(model)))  # adapters begin as nothing
    load_weights(tuned / "whole", model)
    adapted = logits(model)
    assert (adapted - base).abs().max() > 0.1
    merge_adapters(model)
    assert (adapted - logits(model)).abs().max() < 1e-4
    assert_loads(tuned / "merged", logits(model))


@pytest.mark.integrations
def test_peft_loads_the_adapter(tuned: Path, config: Config) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    assert cli.main(["export", str(tuned / "whole"), str(tuned / "adapter"), "--adapter"]) == 0
    theirs = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tuned / "base"), tuned / "adapter"
    ).eval()
    model = plain_model(config).to_empty(device="cpu").eval()
    load_weights(tuned / "whole", model)
    assert (logits(model) - logits(theirs)).abs().max() < 1e-5
    assert theirs.peft_config["default"].lora_alpha == 16
    with torch.no_grad():
        assert (logits(model) - logits(theirs.merge_and_unload())).abs().max() < 1e-4


def test_an_adapter_goes_to_a_folder_of_its_own(tuned: Path) -> None:
    """Twice to the same one."""
    for _ in range(2):
        assert (
            cli.main(["export", str(tuned / "whole"), str(tuned / "by itself"), "--adapter"]) == 0
        )
    names = {path.name for path in (tuned / "by itself").iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors"}
    about = json.loads((tuned / "by itself/adapter_config.json").read_text())
    assert about["r"] == 4
    assert about["base_model_name_or_path"] == str(tuned / "base")
    assert "model.layers.1.mlp.down_proj" in about["target_modules"]
    adapters = load_file(tuned / "by itself/adapter_model.safetensors")
    assert adapters["base_model.model.model.layers.0.self_attn.k_proj.lora_B.weight"].shape == (
        24,
        4,
    )


def test_the_plan_counts_what_is_trained(tuned: Path) -> None:
    """Gradients and the optimizer's state of the adapters alone, over tp as they are split."""
    layouts = ("{}", "{dp_shard: 2}", "{tp: 2}")
    plans = [make_plan(str(tuned / "mine.yaml"), [LORA, f"layout={layout}"]) for layout in layouts]
    for plan in plans:
        adapters = [p for p in plan.parameters if p.trainable]
        assert len(adapters) == 28
        assert all(is_adapter(p.name) for p in adapters)
    sizes = sum(p.shape[0] * p.shape[1] for p in adapters)
    assert plans[0].memory.gradient_bytes == 4 * sizes
    assert plans[0].memory.optimizer_bytes == 8 * sizes
    # over tp
    cuts = {
        p.name.split("layers.0.")[-1]: [(cut.axis, cut.dim) for cut in p.cuts] for p in adapters
    }
    assert cuts["mlp.up_proj.lora_A.weight"] == cuts["mlp.down_proj.lora_B.weight"] == []
    assert cuts["mlp.up_proj.lora_B.weight"] == [("tp", 0)]
    assert cuts["mlp.down_proj.lora_A.weight"] == [("tp", 1)]


def test_the_plan_counts_what_is_frozen(tuned: Path) -> None:
    plan = make_plan(
        str(tuned / "mine.yaml"), ['train.freeze=["*embed*", "*.layers.0.*"]', "layout={}"]
    )
    assert not any(
        p.trainable for p in plan.parameters if "embed" in p.name or "layers.0." in p.name
    )
    assert all(p.trainable for p in plan.parameters if "layers.1." in p.name)


def test_a_layer_whose_weight_is_tied_has_no_adapter() -> None:
    """It would change the other's, too, when it is merged."""
    model = plain_model(Config.load("quickstart", ["model.num_hidden_layers=2"]))
    every = adapted_layers(model, [])
    first, second = (name for name in every if name.endswith("o_proj"))
    every[second].weight = every[first].weight
    assert every.keys() - adapted_layers(model, []).keys() == {first, second}


def test_an_adapter_of_a_layer_that_is_called_by_keyword_adds_as_much() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    add_adapters(model, [], rank=2, alpha=4, dropout=0.0)
    x = torch.ones(1, 3)
    assert torch.equal(model[0](input=x), model[0](x))


def test_an_adapter_of_a_layer_that_is_not_called_is_refused(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its hook would never run, and it would stay zero."""
    data: Any = CustomSamples("ones", [(torch.ones(8).long(), torch.ones(8).long())], None)
    check_start(replace(config, model=replace(config.model, weights=None)), data=data)
    attention = spec_of(config).module.Attention
    forward = attention.forward

    def without_a_call(self: Any, *inputs: Any) -> torch.Tensor:
        layer, self.o_proj = self.o_proj, torch.nn.Identity()
        y = forward(self, *inputs)
        self.o_proj = layer
        return torch.nn.functional.linear(y, layer.weight)

    monkeypatch.setattr(attention, "forward", without_a_call)
    with pytest.raises(InputError, match=r"does not call model\.layers\.0\.self_attn\.o_proj"):
        check_start(config, data=data)


def test_adapters_that_would_count_otherwise_are_refused(tuned: Path, config: Config) -> None:
    """A run that starts from them would start from another model, without a word."""
    config = replace(config, model=replace(config.model, weights=str(tuned / "whole" / LAST)))
    check_first_values(config)
    assert config.train.lora is not None
    other = replace(config.train, lora=replace(config.train.lora, alpha=None))
    with pytest.raises(
        InputError, match=r"alpha 16 and rank 4, and here alpha is 4: give alpha: 16"
    ):
        check_first_values(replace(config, train=other))


def test_trained_adapters_are_opened_also_of_a_model_that_draws_its_own_weights(
    tuned: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One without an init_plan, whose constructor makes the values."""
    weights = replace(config.model, weights=str(tuned / "whole" / LAST))
    mesh = build_mesh(Layout({}))
    monkeypatch.delattr(spec_of(config).module, "init_plan")
    model = build_model(replace(config, model=weights), mesh, torch.device("cpu"))
    known = stored(tuned / "whole" / LAST)
    adapters = {name: p for name, p in model.named_parameters() if is_adapter(name)}
    assert adapters
    for name, parameter in adapters.items():
        assert torch.equal(parameter.detach(), known[name]), name


def test_a_frozen_bias_of_a_router_stays(tmp_path: Path) -> None:
    """Which a step moves without a gradient."""
    sizes = (
        "hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, moe_intermediate_size: 16, "
        "vocab_size: 256"
    )
    sizes += ", n_routed_experts: 4, num_attention_heads: 4, router_bias_speed: 0.1"
    (tmp_path / "mine.yaml").write_text(f"model: {{name: glm4_moe, {sizes}}}{REST}")
    model = plain_model(Config.load(str(tmp_path / "mine.yaml"), ["train.lora={rank: 2}"]))
    speeds = [
        m.balance.bias_speed for m in model.modules() if getattr(m, "balance", None) is not None
    ]
    assert speeds
    assert set(speeds) == {0.0}
