"""The models that come with the project, as plain PyTorch."""

from typing import Any

import pytest
import torch

from meshtrain.config.locate import model_file
from meshtrain.rotary import rotary_frequencies

llama = model_file("llama")
convnet = model_file("convnet")

PUBLISHED = {
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
}


def make(**keys: object) -> torch.nn.Module:
    torch.manual_seed(0)
    small = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 50,
    }
    return llama.Model(llama.Config(**(small | keys))).double()


@pytest.mark.parametrize("preset", PUBLISHED)
def test_parameter_counts_are_the_published_ones(preset: str) -> None:
    with torch.device("meta"):
        model = llama.Model(llama.Config(**llama.presets[preset]))
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[preset]


def test_no_token_sees_a_later_one() -> None:
    model = make(num_key_value_heads=2)
    tokens = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[:, 8:] = 0
    assert torch.equal(model(tokens)[:, :8], model(changed)[:, :8])
    assert not torch.equal(model(tokens)[:, 8:], model(changed)[:, 8:])


def test_only_distances_between_positions_matter() -> None:
    model = make()
    tokens = torch.randint(0, 50, (1, 12))
    moved = model(tokens, positions=torch.arange(100, 112)[None])
    torch.testing.assert_close(moved, model(tokens), rtol=1e-9, atol=1e-9)
    spread = model(tokens, positions=2 * torch.arange(12)[None])
    assert not torch.allclose(spread, model(tokens), rtol=1e-3)


def test_masked_documents_are_as_if_each_were_alone() -> None:
    model = make(num_key_value_heads=1)
    tokens = torch.randint(0, 50, (1, 12))
    documents = torch.tensor([[0] * 5 + [1] * 7])
    positions = torch.tensor([[*range(5), *range(7)]])
    together = model(tokens, positions, documents)
    torch.testing.assert_close(together[:, :5], model(tokens[:, :5]), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(together[:, 5:], model(tokens[:, 5:]), rtol=1e-9, atol=1e-9)


def test_grouped_heads_are_shared_heads() -> None:
    """Two key/value heads for four query heads: the same as four, of which neighbours are equal."""
    grouped, full = make(num_key_value_heads=2), make()
    state = grouped.state_dict()
    for name, weight in state.items():
        if ".k_proj." in name or ".v_proj." in name:
            state[name] = weight.view(2, 1, 8, 32).expand(2, 2, 8, 32).reshape(32, 32)
    full.load_state_dict(state)
    tokens = torch.randint(0, 50, (2, 9))
    torch.testing.assert_close(full(tokens), grouped(tokens), rtol=1e-9, atol=1e-9)


def frequencies(config: Any) -> torch.Tensor:
    arguments = (*config.rope, config.rotary_width, config.max_position_embeddings)
    return rotary_frequencies(*arguments, torch.device("cpu"))


def test_llama3_scaling_stretches_slow_pairs_only() -> None:
    scaling = llama.presets["llama-3.1-8b"]["rope_scaling"]
    keys = {"hidden_size": 512, "num_attention_heads": 4, "rope_theta": 500000.0}
    plain, scaled = frequencies(llama.Config(**keys)), frequencies(llama.Config(**keys, rope_scaling=scaling))
    turns = 8192 * plain / (2 * torch.pi)
    assert torch.equal(scaled[turns >= 4], plain[turns >= 4])
    torch.testing.assert_close(scaled[turns <= 1], plain[turns <= 1] / 8)
    between = (turns > 1) & (turns < 4)
    assert between.any()
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()
    written_as_one = llama.Config(**keys | {"rope_theta": 1.0}, rope_parameters=scaling | {"rope_theta": 500000.0})
    assert torch.equal(frequencies(written_as_one), scaled)


def test_tied_embeddings_are_one_parameter() -> None:
    tied, untied = make(tie_word_embeddings=True), make()
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert len(list(untied.parameters())) == len(list(tied.parameters())) + 1


@pytest.mark.parametrize("module", [llama, convnet])
def test_blocks_hold_every_parameter(module: object) -> None:
    model = module.Model(module.Config())
    assert {id(p) for block in model.blocks() for p in block.parameters()} == {id(p) for p in model.parameters()}


@pytest.mark.parametrize(
    ("keys", "key", "way_out"),
    [
        ({"hidden_size": -1}, "hidden_size", "at least 1"),
        ({"num_attention_heads": 0}, "num_attention_heads", "at least 1"),
        ({"num_key_value_heads": 0}, "num_key_value_heads", "at least 1"),
        ({"num_attention_heads": 7}, "num_attention_heads", "4 or 8"),
        ({"num_key_value_heads": 3}, "num_key_value_heads", "2 or 4"),
        ({"head_dim": 15}, "head_dim", "odd"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling", "llama3"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "rope_scaling", "low_freq_factor"),
    ],
)
def test_impossible_llamas_are_named(keys: dict, key: str, way_out: str) -> None:
    (problem,) = llama.check(llama.Config(**({"num_attention_heads": 8, "hidden_size": 256} | keys)))
    assert problem[0] == key
    assert way_out in problem[1]


def test_a_possible_llama_has_no_problems() -> None:
    assert llama.check(llama.Config()) == []
    for preset in llama.presets.values():
        assert llama.check(llama.Config(**preset)) == []


def test_a_sample_of_the_convnet_does_not_depend_on_its_neighbours() -> None:
    model = convnet.Model(convnet.Config(image_size=8, channels=(8, 12))).double()
    images = torch.randn(4, 1, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(model(images)[:1], model(images[:1]), rtol=1e-12, atol=1e-12)


def test_too_many_stages_for_the_image_are_named() -> None:
    ((key, problem),) = convnet.check(convnet.Config(image_size=8, channels=(8, 8, 8, 8, 8)))
    assert key == "channels"
    assert "at most 4 stages" in problem
    assert convnet.check(convnet.Config(image_size=8, channels=(8, 8, 8, 8))) == []
