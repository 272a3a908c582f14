"""The models that come with the project, as plain PyTorch."""

import pytest
import torch

from meshtrain.job.locate import model_file
from tests.comparing import V, llama, small_llama

convnet = model_file("convnet")

PUBLISHED = {
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
}


def test_parameter_counts_of_presets_are_the_published_ones_and_their_sizes_possible() -> None:
    for preset, published in PUBLISHED.items():
        config = llama.Config(**llama.presets[preset])
        with torch.device("meta"):
            model = llama.Model(config)
        assert sum(p.numel() for p in model.parameters()) == published
        assert llama.check(config) == []
    assert set(PUBLISHED) == set(llama.presets)


def test_masked_documents_are_as_if_each_were_alone() -> None:
    model = small_llama(num_key_value_heads=1).double()
    tokens = torch.randint(V, (1, 12))
    documents = torch.tensor([[0] * 5 + [1] * 7])
    positions = torch.tensor([[*range(5), *range(7)]])
    together = model(tokens, positions, documents)
    torch.testing.assert_close(together[:, :5], model(tokens[:, :5]), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(together[:, 5:], model(tokens[:, 5:]), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("module", [llama, convnet])
def test_blocks_hold_every_parameter(module: object) -> None:
    model = module.Model(module.Config())
    assert {id(p) for block in model.blocks() for p in block.parameters()} == {
        id(p) for p in model.parameters()
    }


def test_a_sample_of_the_convnet_does_not_depend_on_its_neighbours() -> None:
    model = convnet.Model(convnet.Config(image_size=8, channels=(8, 12))).double()
    images = torch.randn(4, 1, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(model(images)[:1], model(images[:1]), rtol=1e-12, atol=1e-12)


def test_too_many_stages_for_the_image_are_named() -> None:
    ((key, problem),) = convnet.check(convnet.Config(image_size=8, channels=(8, 8, 8, 8, 8)))
    assert key == "channels"
    assert "at most 4 stages" in problem
    assert convnet.check(convnet.Config(image_size=8, channels=(8, 8, 8, 8))) == []
