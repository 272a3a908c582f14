"""The parts of `meshtrain.Run` that need no job: what a script gives it is checked where it is
given."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshtrain.data.order import share
from meshtrain.errors import InputError
from meshtrain.layout import Layout
from meshtrain.mesh import build_mesh
from meshtrain.parallel.options import ParallelOptions
from meshtrain.script.data import data_fingerprint
from meshtrain.script.loss_call import call_loss, inputs_of
from meshtrain.script.microbatches import count_microbatches, split_batch
from meshtrain.script.optimizer import (
    GroupNames,
    SpreadOptimizer,
    read_optimizer,
    require_elementwise,
)
from meshtrain.script.run import _length_of, _refuse_torchs
from meshtrain.script.settings import script_config
from tests.script.program import LOSSES, Options, make_data, make_model

CPU = torch.device("cpu")
ARGUMENTS: dict[str, Any] = {
    "layout": "{dp_shard: -1}",
    "world_size": 4,
    "launched": True,
    "variable": None,
    "global_size": 16,
    "micro_size": None,
    "seed": 0,
    "precision": "float32",
    "clip_norm": None,
    "output": "runs/a",
    "every": 100,
    "schedule": None,
}


# Microbatches -------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_size", [None, 1, 2, 3, 5])
@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
@pytest.mark.parametrize("global_size", [1, 5, 6, 16])
def test_microbatches_have_each_sample_once_and_are_equally_many(
    global_size: int, ranks: int, micro_size: int | None
) -> None:
    count = count_microbatches(global_size, micro_size, ranks)
    seen = []
    for rank in range(ranks):
        own = share(global_size, ranks, rank)
        batch = {"x": torch.arange(own.start, own.start + max(len(own), 1))}
        parts = split_batch(batch, own, count)
        assert len(parts) == count
        for part in parts:
            assert len(part.positions) == len(part.samples["x"]) >= 1
            assert micro_size is None or len(part.positions) <= micro_size
            if part.is_real:
                assert part.samples["x"].tolist() == list(part.positions)
                seen += part.positions
    assert seen == list(range(global_size))


def test_a_batch_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(InputError, match=r"of shape \(3, 2\): expected this rank's 4 samples"):
        split_batch([torch.zeros(4), torch.zeros(3, 2)], range(4), 2)
    with pytest.raises(InputError, match="the batch has a str"):
        split_batch({"x": torch.zeros(4), "name": "a"}, range(4), 2)


# The loss -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        ("mean_only", r"returned a Tensor: expected \(sum, count\)"),
        ("mean_as_sum", "a mean over its 2 samples as their sum"),
        ("no_sum", r"returned \(2, 6, 11\) as its sum: expected a scalar tensor"),
        ("count_of_model", "a count that depends on the model"),
        ("penalty", "loss_of uses `parameters` of the model"),
    ],
)
def test_a_loss_that_is_no_sum_and_count_is_refused(loss: str, sentence: str) -> None:
    model = make_model(Options())
    batch = torch.utils.data.default_collate(make_data()[:2])
    with pytest.raises(InputError, match=sentence):
        call_loss(LOSSES[loss], model, batch, 2, CPU)


def test_a_loss_that_does_not_depend_on_the_model_is_refused() -> None:
    model = make_model(Options())
    with pytest.raises(InputError, match="does not depend on the model's parameters"):
        call_loss(lambda model, x: (x.sum(), 1), model, torch.ones(2), 2, CPU)


@pytest.mark.parametrize(
    ("average", "is_refused"),
    [
        (lambda x: F.mse_loss(x, torch.zeros_like(x)), True),
        (lambda x: F.binary_cross_entropy_with_logits(x, torch.ones_like(x)), True),
        (lambda x: F.l1_loss(x, torch.zeros_like(x)), True),
        (lambda x: x.sum(1).mean(), True),
        (lambda x: x.sum(1).mean(0).double(), True),
        (lambda x: F.mse_loss(x, torch.zeros_like(x), reduction="sum"), False),
        (lambda x: x.mean(1).sum(), False),
        # the mean of what two heads have added up
        (lambda x: torch.stack([x.sum(), x.square().sum()]).mean(), False),
        (lambda x: x[:1].mean(), False),
    ],
)
def test_a_mean_over_samples_is_refused_as_their_sum(
    average: Callable[[Tensor], Tensor], is_refused: bool
) -> None:
    def loss_of(model: Any, x: Tensor) -> tuple[Tensor, int]:
        return average(model(x)), len(x)

    def call(size: int) -> None:
        call_loss(loss_of, nn.Linear(2, 2), torch.ones(size, 2), size, CPU)

    call(1)  # the mean of one sample's elements depends on no layout
    if is_refused:
        with pytest.raises(InputError, match="a mean over its 3 samples as their sum"):
            call(3)
    else:
        call(3)


# The data set -------------------------------------------------------------------------------------


def test_a_data_set_is_known_by_its_length_and_first_sample() -> None:
    def digest(sample: Any, samples: int = 2) -> Any:
        return data_fingerprint([sample] * samples).values

    kinds = [
        torch.zeros(3),
        torch.zeros(3, dtype=torch.bfloat16),
        (torch.ones(()), 1),
        {"x": np.zeros(3), "name": "a"},
    ]
    assert [digest(sample) for sample in kinds] == [digest(sample) for sample in kinds]
    assert len({str(digest(sample)) for sample in kinds}) == len(kinds)
    assert digest(torch.ones(3)) != digest(torch.zeros(3))
    assert digest({"name": "a"}) != digest({"name": "b"})
    assert digest(1, samples=2) != digest(1, samples=3)


def test_a_loader_is_no_data_set() -> None:
    data = make_data()
    with pytest.raises(InputError, match="the `dataset` of a DataLoader"):
        _length_of(torch.utils.data.DataLoader(data))
    with pytest.raises(InputError, match="has no length"):
        _length_of(torch.utils.data.Dataset())
    assert _length_of(data) == len(data)


def test_inputs_of_a_stage_are_by_position() -> None:
    model = make_model(Options(model="blocks"))
    batch = torch.utils.data.default_collate(make_data()[:2])
    tokens, mask = inputs_of(LOSSES["by_keyword"], model, batch)
    assert tokens is batch["tokens"]
    assert mask is None
    with pytest.raises(InputError, match="gives the model a list"):
        inputs_of(lambda model, x: (model([x]), 1), model, torch.ones(2))


# The optimizer ------------------------------------------------------------------------------------


def make(name: str, **options: Any) -> torch.optim.Optimizer:
    return getattr(torch.optim, name)([nn.Parameter(torch.randn(5, 3))], **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Adadelta", {}),
        ("Adam", {"amsgrad": True}),
        ("AdamW", {"fused": True}),
        ("Adamax", {}),
        ("ASGD", {}),
        ("NAdam", {}),
        ("RAdam", {}),
        ("RMSprop", {"momentum": 0.9, "centered": True}),
        ("Rprop", {}),
        ("SGD", {"momentum": 0.9, "dampening": 0.1, "foreach": False}),
    ],
)
def test_an_optimizer_of_single_elements_is_taken(name: str, options: dict[str, Any]) -> None:
    optimizer = make(name, lr=0.1, **options)
    require_elementwise(optimizer, CPU, is_split=True)
    assert not optimizer.state


class Normalized(torch.optim.Optimizer):
    """Divides each gradient by its norm, as optimizers of large batches do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                direction = parameter.grad / parameter.grad.norm()
                parameter.data.add_(direction, alpha=-group["lr"])


@pytest.mark.parametrize(
    ("optimizer", "is_split", "sentence"),
    [
        (make("LBFGS"), False, "LBFGS cannot be spread: a step without arguments"),
        (make("Adafactor"), False, "Adafactor keeps `row_var` of a parameter"),
        (Normalized([nn.Parameter(torch.ones(2))]), True, "Normalized updates an element by other"),
    ],
)
def test_another_optimizer_is_refused(
    optimizer: torch.optim.Optimizer, is_split: bool, sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        require_elementwise(optimizer, CPU, is_split=is_split)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"shard_optimizer": True}, "AdamW is none of them: use dp_shard, or give run.prepare"),
        ({"offload": "optimizer"}, "AdamW is none of them: use offload: activations, or give"),
        ({"offload": "both"}, "offload: both keeps the states of meshtrain's own optimizers"),
    ],
)
def test_what_only_meshtrains_optimizers_can_is_refused(
    options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        _refuse_torchs(make("AdamW"), ParallelOptions(**options))
    _refuse_torchs(make("AdamW"), ParallelOptions(offload="activations"))


def test_an_optimizer_of_whole_matrices_is_taken_where_they_are_whole() -> None:
    optimizer = Normalized([nn.Parameter(torch.ones(2))])
    require_elementwise(optimizer, CPU, is_split=False)


def test_an_optimizer_with_a_state_or_other_parameters_is_refused() -> None:
    model = nn.Linear(2, 3)
    optimizer = torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.ones(7))])
    with pytest.raises(InputError, match=r"in group 0 a parameter of shape \(7,\) that is not"):
        GroupNames.of(optimizer, model)

    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(InputError, match=r"has a state already \(step, exp_avg, exp_avg_sq of a"):
        GroupNames.of(optimizer, model)


def test_the_section_of_an_optimizer_is_read_as_a_yaml_s() -> None:
    section = read_optimizer({"name": "muon", "lr": 0.1, "betas": [0.8, 0.9]}, clip_norm=None)
    assert (section.name, section.lr, section.betas) == ("muon", 0.1, (0.8, 0.9))
    assert section.clip_norm is None
    with pytest.raises(InputError, match="there is no key"):
        read_optimizer({"name": "muon", "learning_rat": 0.1}, clip_norm=None)
    with pytest.raises(InputError, match="is an argument of"):
        read_optimizer({"clip_norm": 1.0}, clip_norm=None)


def test_an_optimizer_keeps_groups_and_parameters_that_are_not_split() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    frozen = model[1].bias.requires_grad_(False)
    groups = [
        {"params": [model[0].weight, model[0].bias], "lr": 0.1},
        {"params": [model[1].weight, frozen], "lr": 0.2},
    ]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    names = GroupNames.of(optimizer, model)
    spread = SpreadOptimizer(optimizer, names, model, build_mesh(Layout({})))
    first, second = optimizer.param_groups
    assert [id(p) for p in first["params"]] == [id(model[0].weight), id(model[0].bias)]
    assert [id(p) for p in second["params"]] == [id(model[1].weight)]
    assert (first["lr"], second["lr"], spread.lr) == (0.1, 0.2, 0.1)

    spread.make_states()
    assert list(spread.state(model[1].weight)) == ["momentum_buffer"]
    assert spread.state(frozen) == {}


# Settings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"layout": "{dp_shrad: 4}"}, "dp_shrad"),
        ({"layout": "{dp_shard: 3}"}, "^meshtrain.Run: layout {dp_shard: 3} needs 3 processes and"),
        (
            {"variable": "{dp_shard: 3}"},
            "^MESHTRAIN_LAYOUT: layout {dp_shard: 3} needs 3 processes",
        ),
        ({"launched": False, "layout": "{tp: 2}"}, "torchrun --nproc-per-node=N SCRIPT` starts N"),
        ({"layout": "dp_shard"}, "expected axes and their sizes in braces, such as"),
        ({"layout": "dp_shard: 2, tp: 2"}, "expected axes and their sizes in braces, such as"),
        ({"layout": "{dp_shard: [}"}, "expected axes and their sizes in braces, such as"),
        ({"layout": "{cp: 4}"}, "with cp a rank has a part of each sequence"),
        ({"global_size": 0}, "global_size of meshtrain.Run is 0"),
        ({"micro_size": 2.5}, "micro_size of meshtrain.Run is 2.5"),
        ({"clip_norm": 0.0}, "clip_norm of meshtrain.Run is 0.0"),
        ({"every": -1}, "every of meshtrain.Run is -1"),
        ({"precision": "float16"}, "expected float32, bfloat16 or float64"),
    ],
)
def test_wrong_arguments_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        script_config(**{**ARGUMENTS, **changes})


def test_the_config_of_a_script_has_only_what_the_script_gives() -> None:
    config = script_config(**ARGUMENTS).of_steps(7)
    plain = config.plain()
    assert list(plain) == ["layout", "batch", "pipeline", "optimizer", "train", "checkpoint"]
    assert plain["train"] == {
        "steps": 7,
        "seed": 0,
        "precision": "float32",
        "output": "runs/a",
    }
    assert config.resolved == Layout({"dp_shard": 4})
