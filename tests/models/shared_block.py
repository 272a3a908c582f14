"""A Llama of three layers; the first and the last are the same module, or two modules with the same parameters."""

from dataclasses import dataclass

from torch import nn

from meshtrain.config.locate import model_file

llama = model_file("llama")
init_plan, tp_plan, check = llama.init_plan, llama.tp_plan, llama.check


@dataclass(frozen=True)
class Config(llama.Config):
    one_module: bool = True


class Model(llama.Model):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        first, second = self.model.layers
        third = first
        if not config.one_module:
            third = llama.Layer(config)
            for name, module in third.named_modules():
                for own in module._parameters:
                    module._parameters[own] = first.get_submodule(name)._parameters[own]
        self.model.layers = nn.ModuleList([first, second, third])
