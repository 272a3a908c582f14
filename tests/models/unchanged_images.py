"""The ViT of transformers (`unchanged.py`), a model of images."""

from torch import nn

from tests.float64_inside import keep_float64
from tests.models import unchanged

Config = unchanged.ImageConfig


def build(config: Config) -> nn.Module:
    keep_float64("transformers")
    return unchanged.vit(config)


Model = build
