"""Which blocks are alike, and what stands for many of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshtrain.config import Config
from meshtrain.config.model_spec import model_spec
from meshtrain.foresight.hardware import load
from meshtrain.foresight.model import alike
from meshtrain.foresight.prediction import Prediction
from meshtrain.modeling.build import plain_model, spec_of
from meshtrain.modeling.kinds import kind_of, known_blocks, repeated, without
from meshtrain.pipeline.stage import OtherStageBlock, blocks_of
from tests.foresight.traced import LLAMA
from tests.launching import ROOT


class Block(nn.Module):
    def __init__(
        self, layer_idx: int, window: int, width: int = 4, layer_type: str = "full"
    ) -> None:
        super().__init__()
        self.layer_idx, self.window, self.layer_type = layer_idx, window, layer_type
        self.mix = nn.Linear(width, width)


def test_blocks_of_other_settings_types_and_shapes_are_no_kin() -> None:
    assert kind_of(Block(0, 8)) == kind_of(Block(1, 8))
    others = (
        Block(0, 16),
        Block(0, 8, 5),
        Block(0, 8),
        Block(0, 8).requires_grad_(False),
        Block(0, 8, 4, "sliding"),
    )
    others[2].mix = nn.Bilinear(2, 2, 4)
    assert len({kind_of(block) for block in (Block(0, 8), *others)}) == 6


def loaded(*overrides: str) -> Config:
    return Config.load(
        ROOT / "configs/quickstart.yaml", [*LLAMA, "model.num_hidden_layers=30", *overrides]
    )


def test_one_block_of_each_kind_is_left() -> None:
    """With its number, so that the model's forward finds it."""
    config = loaded()
    first = alike(config)
    assert first == (0, *[1] * 30, 31, 32)
    blocks = blocks_of(without(spec_of(config), repeated(first)).meta)
    assert [i for i, block in enumerate(blocks) if not isinstance(block, OtherStageBlock)] == [
        0,
        1,
        31,
        32,
    ]


def test_blocks_before_the_first_trained_one_are_of_their_own() -> None:
    """The input of the second has no gradient."""
    assert alike(loaded('train.freeze=["*embed*", "*.layers.0.*", "*.layers.2.*"]')) == (
        0,
        1,
        2,
        3,
        *[4] * 27,
        31,
        32,
    )


LANGUAGE_MODELS = sorted(
    path.stem
    for path in (ROOT / "models").glob("*.py")
    if path.stem not in ("convnet", "transformers")
)
OF_TRANSFORMERS = {
    "model_type": "llama",
    "config": {"hidden_size": 256, "num_hidden_layers": 12, "num_attention_heads": 8},
    "vocab_size": 256,
}


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        *[(name, {"num_hidden_layers": 12, "vocab_size": 256}) for name in LANGUAGE_MODELS],
        ("transformers", OF_TRANSFORMERS),
    ],
)
def test_layers_of_every_language_model_are_alike(name: str, keys: dict[str, Any]) -> None:
    spec = model_spec(name, keys)
    known = known_blocks(spec, 32, False)
    width = spec.meta.get_submodule("model.embed_tokens").embedding_dim
    assert len(set(known.first)) <= 5 < len(known.first)
    assert len(known.first) in (14, 15)  # 12 layers, embedding and head, and a norm of its own
    assert known.outputs == (*[32 * width] * (len(known.first) - 1), 32 * 256)


def test_what_stages_of_a_convnet_hand_on() -> None:
    config = Config.load(
        ROOT / "configs/digits.yaml", ["layout={pp: 2}", "pipeline.split=[2, 1]"], world_size=2
    )
    model, sizes = plain_model(config), list[int]()
    blocks_of(model)[1].register_forward_hook(
        lambda block, inputs, output: sizes.append(output.nbytes)
    )
    model(torch.zeros(config.batch.micro_size, 1, 8, 8, device="meta"))
    assert [Prediction(config, load("cpu")).handed_on] == sizes


OWN = """
from dataclasses import dataclass
from torch import nn

@dataclass(frozen=True)
class Config:
    vocab_size: int = 256
    layers: int = 12

class Layer(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.kind = ("wide", "narrow")[number % 2]
        self.mix = nn.Linear(16, 16)

    def forward(self, x):
        return x + self.mix(x)

class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed, self.head = nn.Embedding(config.vocab_size, 16), nn.Linear(16, config.vocab_size)
        self.layers = nn.ModuleList([Layer(i) for i in range(config.layers)])
        self.pool = nn.Identity()

    def blocks(self):
        return [self.embed, *self.layers, self.head]

    def forward(self, tokens, positions, documents=None):
        x = self.embed(tokens)
        for layer in self.layers:
            assert layer.kind in ("wide", "narrow")
            x = layer(x)
        return self.head(x)
"""


@pytest.mark.parametrize(
    ("old", "new", "first"),
    [
        ("", "", (0, *[1, 2] * 6, 13)),  # kinds that alternate; the forward reads a setting of each
        ("x = layer(x)", "x = layer(x=x)", (0, *[1, 2] * 6, 13)),  # called by keyword
        ("in self.layers:\n", "in self.layers:\n            layer.mix.weight\n", range(14)),
        (
            "x = layer(x)",
            "x = layer(x)[:, : -2 if x.shape[1] > 32 - 8 else None]",
            range(14),
        ),  # sizes change outside
        (
            "return x + self.mix(x)",
            "return (x + self.mix(x)).double().float()[:, :-1]",
            range(14),
        ),  # and inside
        (
            "self.pool = nn.Identity()",
            "self.layers[2].mix = self.layers[3].mix",
            (0, 1, 2, 3, 4, *[1, 2] * 4, 13),
        ),
    ],
)
def test_blocks_of_a_model_of_ones_own(
    old: str, new: str, first: tuple[int, ...], tmp_path: Path
) -> None:
    """A block that is skipped gets what the one gets that stands for it, which hands on as much, or
    none is skipped."""
    file = tmp_path / "own.py"
    file.write_text(OWN.replace(old, new) if old else OWN)
    config = Config.load(
        ROOT / "configs/quickstart.yaml", [f"model={{name: {file}}}", "data.seq_len=32"]
    )
    assert alike(config) == tuple(first)
