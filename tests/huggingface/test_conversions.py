"""Files of transformers' classes: read by their own conversion tables, and written as
`save_pretrained` does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from meshtrain.errors import InputError
from meshtrain.huggingface.conversions import FileNames, file_names
from meshtrain.huggingface.experts import attach_balance
from meshtrain.huggingface.export import plan_export
from meshtrain.huggingface.load import KINDS, load_weights, open_folder
from meshtrain.huggingface.safetensors import Entry
from tests.huggingface import families
from tests.huggingface.families import FAMILIES, causal_lm

# Other forms: fused in files too, under other names, and only in some layers.
MORE = {
    "phimoe": {"num_local_experts": 4},
    "granitemoe": {"num_local_experts": 4, "attention_multiplier": 1.0},
    "jamba": {"num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
}


def with_table(model: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The same model as one of a model file with these names."""
    model.__class__ = type("Own", (type(model),), {"__module__": families.__name__})
    names = file_names(model)
    names.require_supported()
    monkeypatch.setattr(families, "stored_as", names.stored_as, raising=False)
    return model


@pytest.mark.parametrize("family", [*FAMILIES, *MORE])
def test_what_transformers_saves_is_read_and_written(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    keys = MORE.get(family, {})
    theirs = causal_lm(family, **keys)
    theirs.save_pretrained(tmp_path / "theirs")
    with torch.device("meta"):
        ours = causal_lm(family, **keys)
    ours = with_table(ours, monkeypatch)
    ours.to_empty(device="cpu")
    with open_folder(tmp_path / "theirs") as source:
        assert load_weights(ours, source) == []
    expected = theirs.state_dict()
    actual = ours.state_dict()
    assert list(actual) == list(expected)
    for name, tensor in actual.items():
        assert torch.equal(tensor, expected[name]), name

    (tmp_path / "ours").mkdir()
    entries = [Entry(name, KINDS[x.dtype], tuple(x.shape)) for name, x in actual.items()]
    _, parts = plan_export(entries, torch.float32, stored_as=families.stored_as)
    files = {
        name: actual[own][piece.part].reshape(piece.shape).clone()
        for name, (own, piece) in parts.items()
    }
    saved = load_file(tmp_path / "theirs" / "model.safetensors")
    assert files.keys() == saved.keys()
    save_file(files, tmp_path / "ours" / "model.safetensors", {"format": "pt"})
    (tmp_path / "theirs" / "config.json").rename(tmp_path / "ours" / "config.json")
    again, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(report.values()), report
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_layers_have_one_row_and_loads_none() -> None:
    model = causal_lm("mixtral", output_router_logits=True)
    attach_balance(model)
    experts = "model.layers.*.block_sparse_moe.experts.{}"
    assert file_names(model) == FileNames(
        {
            "model.layers.*.mlp.gate.weight": ("model.layers.*.block_sparse_moe.gate.weight",),
            "model.layers.*.mlp.experts.gate_up_proj": (
                f"{experts}.w1.weight",
                f"{experts}.w3.weight",
            ),
            "model.layers.*.mlp.experts.down_proj": (f"{experts}.w2.weight",),
            "*.balance.loads": (),
        }
    )


def test_a_tensor_that_files_have_in_another_form_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import core_model_loading

    def transposed(model: nn.Module, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        name = "model.layers.0.self_attn.q_proj.weight"
        return state | {
            "q": state.pop(name).t(),
            "joined": torch.cat([state.pop("lm_head.weight")]),
        }

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", transposed)
    names = file_names(causal_lm("mixtral"))
    assert set(names.unsupported) == {"q", "joined"}
    with pytest.raises(InputError, match="transformers stores q, joined in another form"):
        names.require_supported()
