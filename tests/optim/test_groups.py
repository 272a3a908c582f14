"""Which optimizer, rate and decay a parameter gets; and what a config of an optimizer may not say."""

import re

import pytest
import torch

from meshtrain.config import Config, ConfigErrors
from meshtrain.config.schema import ParamGroup
from meshtrain.optim.groups import GroupOptions, group_options
from meshtrain.parallel.sharding import ParameterSpec
from tests.optim.steps import assert_same, config, linear_and_norm, optimizer_of, set_gradients, table, update
from tests.parity.experiments import QUICKSTART


def test_the_first_group_that_matches_counts() -> None:
    groups = (
        ParamGroup("*.bias", weight_decay=0.5),
        ParamGroup("0.*", lr=0.1, name="sgd"),
        ParamGroup("*", lr_scale=0.25),
    )
    keys = config(lr=0.2, weight_decay=0.1, groups=groups)
    expected = {
        ParameterSpec("0.bias", (3,)): GroupOptions(0.5, 1.0, "adamw"),
        ParameterSpec("0.weight", (3, 4)): GroupOptions(0.1, 0.5, "sgd"),
        ParameterSpec("1.weight", (3, 4)): GroupOptions(0.1, 0.25, "adamw"),
        ParameterSpec("1.scale", (3,)): GroupOptions(0.0, 0.25, "adamw"),
    }
    assert {spec: group_options(keys, spec) for spec in expected} == expected


def test_muon_is_for_matrices_between_embedding_and_head() -> None:
    for row in table("tables")["muon"]:
        groups = (ParamGroup(row["group"][0], name=row["group"][1]),) if "group" in row else ()
        options = group_options(config(name="muon", groups=groups), ParameterSpec(row["name"], tuple(row["shape"])))
        assert options.name == row["optimizer"], row


def test_what_a_config_may_not_say() -> None:
    problems = []
    for case in table("tables")["refused"]:
        with pytest.raises(ConfigErrors) as refused:
            Config.load(QUICKSTART, case["overrides"])
        if not re.search(case["message"], str(refused.value)):
            problems.append((case, refused.value))
    assert not problems


@pytest.mark.parametrize("nesterov", [False, True])
def test_groups_are_updated_as_by_torchs_optimizers(nesterov: bool) -> None:
    """A matrix by SGD at half the rate, vectors by AdamW, some of them without decay."""
    ours, theirs = linear_and_norm(), linear_and_norm()
    groups = (
        ParamGroup("0.weight", name="sgd", lr=0.05),
        ParamGroup("0.bias", weight_decay=0.2),
        ParamGroup("*", lr_scale=0.5),
    )
    optimizer = optimizer_of(ours, lr=0.1, groups=groups, momentum=0.8, nesterov=nesterov)
    sgd = torch.optim.SGD([theirs[0].weight], lr=0.05, momentum=0.8, nesterov=nesterov, weight_decay=0.1)
    vectors = [
        {"params": [theirs[0].bias], "lr": 0.1, "weight_decay": 0.2},
        {"params": theirs[1].parameters(), "lr": 0.05, "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(vectors, betas=(0.9, 0.95), eps=1e-8)
    for step in (1, 2, 3):
        for model in (ours, theirs):
            set_gradients(model, step)
        assert update(optimizer, step) == 0.1
        sgd.step()
        adamw.step()
    assert_same(ours, theirs)
    assert list(optimizer.state(ours[0].weight)) == ["momentum_buffer"]
