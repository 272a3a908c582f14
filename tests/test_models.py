"""The models that come with the project, as plain PyTorch."""

import pytest
import torch

from meshtrain.config.locate import model_file

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


def test_parameter_counts_of_presets_are_the_published_ones_and_their_sizes_possible() -> None:
    for preset, published in PUBLISHED.items():
        config = llama.Config(**llama.presets[preset])
        with torch.device("meta"):
            model = llama.Model(config)
        assert sum(p.numel() for p in model.parameters()) == published
        assert llama.check(config) == []
    assert set(PUBLISHED) == set(llama.presets)


def test_masked_documents_are_as_if_each_were_alone() -> None:
    model = make(num_key_value_heads=1)
    tokens = torch.randint(0, 50, (1, 12))
    documents = torch.tensor([[0] * 5 + [1] * 7])
    positions = torch.tensor([[*range(5), *range(7)]])
    together = model(tokens, positions, documents)
    torch.testing.assert_close(together[:, :5], model(tokens[:, :5]), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(together[:, 5:], model(tokens[:, 5:]), rtol=1e-9, atol=1e-9)


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


def test_a_sample_of_the_convnet_does_not_depend_on_its_neighbours() -> None:
    model = convnet.Model(convnet.Config(image_size=8, channels=(8, 12))).double()
    images = torch.randn(4, 1, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(model(images)[:1], model(images[:1]), rtol=1e-12, atol=1e-12)


def test_too_many_stages_for_the_image_are_named() -> None:
    ((key, problem),) = convnet.check(convnet.Config(image_size=8, channels=(8, 8, 8, 8, 8)))
    assert key == "channels"
    assert "at most 4 stages" in problem
    assert convnet.check(convnet.Config(image_size=8, channels=(8, 8, 8, 8))) == []
