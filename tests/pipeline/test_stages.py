"""Taking a stage out of a model: which blocks stay, which parameters, under which names."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from meshtrain.config.locate import model_file
from meshtrain.errors import InputError
from meshtrain.pipeline.stage import OtherStageBlock, blocks_of, keep_stage, stages_of_parameter

llama = model_file("llama")


def small(tied_embeddings: bool = False) -> nn.Module:
    """Six blocks: the embedding, three layers, the norm, the head."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "vocab_size": 16}
    return llama.Model(llama.Config(**sizes, num_hidden_layers=3, tie_word_embeddings=tied_embeddings))


def stage(first: int, end: int, tied_embeddings: bool = False) -> nn.Module:
    model = small(tied_embeddings)
    keep_stage(model, first, end)
    return model


@pytest.mark.parametrize("tied_embeddings", [False, True])
@pytest.mark.parametrize("cuts", [(0, 6), (0, 1, 6), (0, 2, 4, 6), (0, 1, 2, 3, 4, 5, 6)])
def test_stages_one_after_the_other_are_the_model(cuts: tuple[int, ...], tied_embeddings: bool) -> None:
    whole, tokens = small(tied_embeddings), torch.arange(10).view(2, 5)
    known = dict(whole.named_parameters(remove_duplicate=False))
    stages = [stage(first, end, tied_embeddings) for first, end in pairwise(cuts)]
    x: Tensor = tokens
    names: set[str] = set()
    for i, part in enumerate(stages):
        x = part(tokens) if i == 0 else part(x, torch.arange(5)[None])
        held = dict(part.named_parameters(remove_duplicate=False))
        assert all(torch.equal(parameter, known[name]) for name, parameter in held.items())
        names |= set(held)
    assert torch.equal(x, whole(tokens))
    assert names == set(known), "every parameter is in a stage, under the name that it has in the model"


def test_a_stage_has_no_other_parameters_than_those_of_its_blocks() -> None:
    names = [name for name, _ in stage(2, 4).named_parameters()]
    assert names
    assert all(name.startswith(("model.layers.1.", "model.layers.2.")) for name in names)
    model = stage(2, 4)
    assert isinstance(model.get_submodule("model.embed_tokens"), OtherStageBlock)
    assert isinstance(model.get_submodule("lm_head"), OtherStageBlock)
    assert len(blocks_of(model)) == 6


def test_a_tied_weight_keeps_both_of_its_names() -> None:
    """So that whoever goes by names (first values, weights of a file, splitting) finds it, and it is one parameter."""
    for first, end in ((0, 2), (4, 6)):
        model = stage(first, end, tied_embeddings=True)
        names = dict(model.named_parameters(remove_duplicate=False))
        assert names["model.embed_tokens.weight"] is names["lm_head.weight"]
    middle = stage(2, 4, tied_embeddings=True)
    assert "lm_head.weight" not in dict(middle.named_parameters(remove_duplicate=False))


def test_a_module_in_no_block_goes_with_the_block_before_it() -> None:
    """The dropout behind the embedding: a later stage must not drop its input a second time."""
    assert isinstance(stage(1, 6).get_submodule("model.dropout"), OtherStageBlock)
    assert not isinstance(stage(0, 1).get_submodule("model.dropout"), OtherStageBlock)


class Loose(nn.Module):
    """A model with something of its own around its blocks."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.before = nn.SiLU()
        self.first = nn.Linear(2, 2)
        self.between = nn.SiLU()
        self.second = nn.Linear(2, 2)
        self.after = nn.SiLU()
        if what == "parameter":
            self.scale = nn.Parameter(torch.ones(2))
        if what == "module":
            self.extra = nn.Sequential(nn.Linear(2, 2))

    def blocks(self) -> list[nn.Module]:
        return [self.first, self.second]

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.second(self.between(self.first(self.before(x)))))


@pytest.mark.parametrize(("what", "named"), [("parameter", "scale"), ("module", "extra.0.weight")])
def test_a_parameter_in_no_block_is_refused(what: str, named: str) -> None:
    with pytest.raises(InputError, match=rf"the parameter {named} is in none of the model's blocks\(\).*use pp: 1"):
        keep_stage(Loose(what), 0, 1)


@pytest.mark.parametrize("how", ["twice", "within another"])
def test_a_block_that_is_there_twice_is_refused(how: str) -> None:
    model = Loose("")
    model.second = model.first if how == "twice" else nn.Sequential(model.first)
    for act in (lambda: keep_stage(model, 0, 1), lambda: stages_of_parameter(model, [(0, 1), (1, 2)])):
        with pytest.raises(InputError, match=r"blocks\(\) name first twice, or within another block.*use pp: 1"):
            act()


def test_what_is_around_the_blocks_goes_with_the_block_before_it_or_the_first() -> None:
    first, second = Loose(""), Loose("")
    keep_stage(first, 0, 1)
    keep_stage(second, 1, 2)
    names = ("before", "between", "after")
    assert [type(first.get_submodule(name)) for name in names] == [nn.SiLU, nn.SiLU, OtherStageBlock]
    assert [type(second.get_submodule(name)) for name in names] == [OtherStageBlock, OtherStageBlock, nn.SiLU]


def test_blocks_of_other_stages_keep_their_settings() -> None:
    """Which a model's forward may read of each."""
    model = small()
    model.model.layers[0].window = 7
    keep_stage(model, 2, 4)
    placeholder = model.get_submodule("model.layers.0")
    assert isinstance(placeholder, OtherStageBlock)
    assert (placeholder.window, len(list(placeholder.parameters()))) == (7, 0)


def test_which_stages_hold_a_parameter() -> None:
    bounds = [(0, 2), (2, 4), (4, 6)]
    holding = stages_of_parameter(small(), bounds)
    assert set(holding) == {name for name, _ in small().named_parameters()}
    assert holding["model.embed_tokens.weight"] == (0,)
    assert holding["model.layers.0.mlp.up_proj.weight"] == (0,)
    assert holding["model.layers.2.mlp.up_proj.weight"] == (1,)
    assert holding["lm_head.weight"] == (2,)
    assert all(len(stages) == 1 for stages in holding.values())
    one = stages_of_parameter(small(tied_embeddings=True), bounds)
    tied = {name: stages for name, stages in one.items() if len(stages) > 1}
    assert tied == {"model.embed_tokens.weight": (0, 2)}
    assert "lm_head.weight" not in one
    both_in_one = stages_of_parameter(small(tied_embeddings=True), [(0, 6)])
    assert all(stages == (0,) for stages in both_in_one.values())
