"""A Llama in which some blocks or single layers are frozen: those whose names match the patterns `frozen`."""

from dataclasses import dataclass
from fnmatch import fnmatchcase

from meshtrain.config.locate import model_file

llama = model_file("llama")
init_plan, tp_plan, check = llama.init_plan, llama.tp_plan, llama.check


@dataclass(frozen=True)
class Config(llama.Config):
    frozen: tuple[str, ...] = ("*.up_proj.weight", "*.k_proj.weight", "*.1.*.o_proj.weight")


class Model(llama.Model):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not any(fnmatchcase(name, pattern) for pattern in config.frozen))
