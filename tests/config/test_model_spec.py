"""The model of a config: built once by its constructor, and copied where somebody changes it."""

import os
from pathlib import Path

import pytest
import torch

from meshtrain.config import Config, spec_of
from meshtrain.config.model_spec import ModelSpec, model_spec
from meshtrain.errors import InputError
from meshtrain.huggingface.stored_names import table_of
from meshtrain.job import locate
from meshtrain.layout import Layout
from meshtrain.mesh import build_mesh
from meshtrain.modeling.build import build_model
from meshtrain.parallel.tp_plan import plan_of
from tests.comparing import Peak
from tests.launching import forked
from tests.parity.experiments import QUICKSTART, SMALL

COUNTED = """
import os
from meshtrain.job.locate import model_file

llama = model_file("llama")
Config, tp_plan, check = llama.Config, llama.tp_plan, llama.check
{plan}

class Model(llama.Model):
    def __init__(self, config) -> None:
        super().__init__(config)
        with open({log!r}, "a") as file:
            print(os.getpid(), self.lm_head.weight.device.type, file=file)
"""

HOOKED = """
from dataclasses import dataclass
import torch
from torch import nn

@dataclass(frozen=True)
class Config:
    width: int = 4

class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layer = nn.Linear(config.width, config.width)
        self.outputs = []
        self.layer.register_forward_hook(lambda module, inputs, output: self.outputs.append(output))

    def forward(self, x):
        return self.layer(x)
"""


VALUES = """
import numpy
import torch
from meshtrain.job.locate import model_file

llama = model_file("llama")
Config, tp_plan, check, init_plan = llama.Config, llama.tp_plan, llama.check, llama.init_plan

class Model(llama.Model):
    def __init__(self, config) -> None:
        super().__init__(config)
        self.scale = torch.tensor(0.5)
        self.order = numpy.random.permutation(99).tolist()
        self.rates = torch.linspace(0, 1, 3).tolist()

    def forward(self, *inputs):
        return super().forward(*inputs) * self.scale * self.rates[2]
"""


@pytest.mark.parametrize(
    ("layout", "plan"), [("{pp: 2}", "init_plan = llama.init_plan"), ("{dp_shard: 2}", "")]
)
def test_a_start_constructs_the_model_once(layout: str, plan: str, tmp_path: Path) -> None:
    """On the meta device; and once more with values where only the constructor knows them."""
    log, file = tmp_path / "log", tmp_path / "counted.py"
    file.write_text(COUNTED.format(plan=plan, log=str(log)))
    keys = [
        f"model.name={file}",
        "model.tie_word_embeddings=true",
        "train.steps=1",
        f"train.output={tmp_path}/run",
    ]
    forked(
        2, "-m", "meshtrain.train", QUICKSTART, *SMALL, *keys, f"layout={layout}", timeout=280
    ).check()
    devices: dict[str, list[str]] = {}
    for line in log.read_text().splitlines():
        pid, device = line.split()
        devices.setdefault(pid, []).append(device)
    assert [sorted(used) for used in devices.values()] == [
        ["meta"] if plan else ["cpu", "meta"]
    ] * 2


def test_a_copy_is_the_model_and_shares_nothing_with_it() -> None:
    spec = model_spec("llama", {"tie_word_embeddings": True})
    copy = spec.copy()
    assert copy.lm_head.weight is copy.model.embed_tokens.weight
    assert [(name, p.shape, p.device) for name, p in copy.named_parameters()] == [
        (name, p.shape, torch.device("meta")) for name, p in spec.meta.named_parameters()
    ]
    assert not {*copy.modules(), *copy.parameters()} & {
        *spec.meta.modules(),
        *spec.meta.parameters(),
    }


def test_a_hook_of_a_copy_is_its_own(tmp_path: Path) -> None:
    """It names the model, which a copy by `copy.deepcopy` would leave as it is."""
    (tmp_path / "hooked.py").write_text(HOOKED)
    spec: ModelSpec = model_spec(os.fspath(tmp_path / "hooked.py"), {})
    copy = spec.copy()
    copy(torch.empty(2, 4, device="meta"))
    assert (len(copy.outputs), len(spec.meta.outputs)) == (1, 0)


def test_a_constructor_may_ask_for_values_keep_tensors_and_draw_by_numpy(tmp_path: Path) -> None:
    """The meta device has no values, an attribute none by an `init_plan`, and each rank must draw
    the same."""
    (tmp_path / "values.py").write_text(VALUES)
    keys = [
        f"model.name={tmp_path / 'values.py'}",
        "model.tie_word_embeddings=true",
        "layout={dp_shard: 1}",
    ]
    config = Config.load(QUICKSTART, [*SMALL, *keys])
    assert spec_of(config).meta.lm_head.weight is spec_of(config).meta.model.embed_tokens.weight
    assert {p.device.type for p in spec_of(config).meta.parameters()} == {"meta"}
    model, same = (
        build_model(config, build_mesh(Layout({})), torch.device("cpu")) for _ in range(2)
    )
    assert model.order == same.order
    assert model(torch.zeros(1, 4, dtype=torch.int64), torch.arange(4)[None], None).isfinite().all()


def test_the_shapes_of_a_model_that_reads_values_take_no_memory(tmp_path: Path) -> None:
    """A constructor that does not run on the meta device gets memory for other tensors alone."""
    (tmp_path / "values.py").write_text(VALUES)
    keys = {"hidden_size": 64, "vocab_size": 4096}
    spec: ModelSpec = model_spec(os.fspath(tmp_path / "values.py"), keys)
    with Peak([]) as peak:
        sizes = [parameter.nbytes for parameter in spec.meta.parameters()]
    assert peak.bytes < max(sizes) + 2**14 < sum(sizes)


PLANNED = """
from meshtrain.job.locate import model_file

llama = model_file("llama")
Config, init_plan = llama.Config, llama.init_plan

class Model(llama.Model):
    pass

def tp_plan(config):
    assert isinstance(config, Config)
    plan = dict(llama.tp_plan)
    if config.tie_word_embeddings:
        del plan["lm_head"]
    return plan

def stored_as(config):
    return {f"model.layers.{config.num_hidden_layers - 1}.*": ("last.*",)}
"""


def test_plans_may_be_functions_of_the_config(tmp_path: Path) -> None:
    file = tmp_path / "planned.py"
    file.write_text(PLANNED)
    spec = model_spec(str(file), {"num_hidden_layers": 2})
    assert spec.plan("tp_plan")["lm_head"] == "colwise_logits"
    assert spec.plan("cp_plan") is None
    tied = model_spec(str(file), {"num_hidden_layers": 3, "tie_word_embeddings": True})
    assert "lm_head" not in tied.plan("tp_plan")
    # Each model knows its own, copies too.
    assert "lm_head" in plan_of(spec.copy(), "tp_plan")
    assert "lm_head" not in plan_of(tied.copy(), "tp_plan")
    assert table_of(tied.meta)["model.layers.2.*"] == ("last.*",)
    # An option of `parallelize` takes the place of the file's.
    assert plan_of(tied.meta, "tp_plan", {"*": "colwise"}) == {"*": "colwise"}


def test_a_function_of_the_config_needs_one(tmp_path: Path) -> None:
    file = tmp_path / "planned.py"
    file.write_text(PLANNED)
    module = locate.model_file(str(file))
    config = module.Config(num_hidden_layers=2)
    model = module.Model(config)
    del model.config
    with pytest.raises(InputError, match=r"tp_plan is a function of the config, which Model"):
        plan_of(model, "tp_plan")
    model.config = config
    assert "lm_head" in plan_of(model, "tp_plan")
