"""Which blocks are alike, and what stands for many of them."""

from torch import nn

from meshtrain.config.model_spec import model_spec
from meshtrain.modeling.few_layers import few_layers, kind_of
from meshtrain.pipeline.stage import blocks_of


class Block(nn.Module):
    def __init__(self, layer_idx: int, window: int, width: int = 4, layer_type: str = "full") -> None:
        super().__init__()
        self.layer_idx, self.window, self.layer_type = layer_idx, window, layer_type
        self.mix = nn.Linear(width, width)


def test_blocks_of_other_settings_types_and_shapes_are_no_kin() -> None:
    assert kind_of(Block(0, 8)) == kind_of(Block(1, 8))
    others = Block(0, 16), Block(0, 8, 5), Block(0, 8), Block(0, 8).requires_grad_(False), Block(0, 8, 4, "sliding")
    others[2].mix = nn.Bilinear(2, 2, 4)
    assert len({kind_of(block) for block in (Block(0, 8), *others)}) == 6


def test_few_layers_have_one_of_each_kind() -> None:
    keys = {"hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 64}
    spec = model_spec("llama", {**keys, "num_hidden_layers": 30})
    few, places = few_layers(spec)
    assert len(blocks_of(few.meta)) < 6
    assert len(places) == len(blocks_of(spec.meta))
    for block, place in zip(blocks_of(spec.meta), places, strict=True):
        assert kind_of(block) == kind_of(blocks_of(few.meta)[place])
    assert places[-1] == len(blocks_of(few.meta)) - 1


def test_layers_before_the_first_trained_one_are_of_their_own() -> None:
    keys = {"hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 64}
    frozen = ("*embed*", "*.layers.0.*", "*.layers.2.*")
    few, places = few_layers(model_spec("llama", {**keys, "num_hidden_layers": 30}, frozen))
    assert len(blocks_of(few.meta)) == 7
    assert places == [0, 1, 2, 3, *[4] * 27, 5, 6]  # the input of the second has no gradient
