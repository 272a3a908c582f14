"""Parameter groups by patterns of names, and SGD."""

import pytest
import torch
from torch import nn

from meshtrain.config import Config, ConfigErrors
from meshtrain.config.schema import Optimizer as Keys
from meshtrain.config.schema import ParamGroup
from meshtrain.layout import Layout
from meshtrain.mesh import build_mesh
from meshtrain.optim import Optimizer
from meshtrain.optim.groups import GroupOptions, group_options
from meshtrain.parallel.sharding import ParameterSpec
from tests.parity.experiments import QUICKSTART

MESH = build_mesh(Layout({"dp_shard": 1}))
NORMS = "{match: '*norm*', weight_decay: 0.3, lr: 0.5}"


def test_the_first_group_that_matches_counts() -> None:
    groups = (
        ParamGroup("*.bias", weight_decay=0.5),
        ParamGroup("0.*", lr=0.1, name="sgd"),
        ParamGroup("*", lr_scale=0.25),
    )
    keys = Keys(lr=0.2, weight_decay=0.1, groups=groups)
    found = {
        name: group_options(keys, ParameterSpec(name, shape))
        for name, shape in {"0.bias": (3,), "0.weight": (3, 4), "1.weight": (3, 4), "1.scale": (3,)}.items()
    }
    assert found == {
        "0.bias": GroupOptions(0.5, 1.0, "adamw"),
        "0.weight": GroupOptions(0.1, 0.5, "sgd"),
        "1.weight": GroupOptions(0.1, 0.25, "adamw"),
        "1.scale": GroupOptions(0.0, 0.25, "adamw"),
    }


def test_a_config_has_groups_and_keeps_them() -> None:
    config = Config.load(QUICKSTART, [f"optimizer.groups=[{NORMS}]"])
    assert config.optimizer.groups == (ParamGroup("*norm*", lr=0.5, weight_decay=0.3),)
    assert "weight_decay: 0.3" in config.to_yaml()


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ("[{match: '*norm*', name: muon}]", r"group 0: muon is for matrices, and \*norm\* has none"),
        ("[{match: '*nrom*'}]", "no parameter that is trained is left for *nrom*; near it are model.norm.weight"),
        (f"[{NORMS}, {{match: model.norm.weight}}]", "group 1: .* what it matches is in group 0: put it before"),
        ("[{match: '*', lr: 1.0, lr_scale: 2.0}]", "group 0 has an lr and an lr_scale"),
        ("[{mach: '*'}]", "did you mean match"),
        ("[{match: '*', name: adamv}]", "expected one of `adamw`"),
    ],
)
def test_groups_that_are_none(groups: str, message: str) -> None:
    with pytest.raises(ConfigErrors, match=message.replace("*nrom*", r"\*nrom\*")):
        Config.load(QUICKSTART, [f"optimizer.groups={groups}"])


def test_only_adamw_keeps_its_state_in_bfloat16() -> None:
    keys = ["optimizer.name=muon", "optimizer.state_precision=bfloat16"]
    with pytest.raises(ConfigErrors, match="is built for adamw, and parameters here have muon: use float32"):
        Config.load(QUICKSTART, keys)


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_is_torchs_beside_adamw(nesterov: bool) -> None:
    """Vectors are updated by AdamW, matrices by SGD at half the rate."""
    ours, theirs = (nn.Linear(4, 3).double() for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    groups = (ParamGroup("weight", name="sgd", lr=0.05), ParamGroup("bias", weight_decay=0.2))
    keys = Keys(lr=0.1, groups=groups, momentum=0.8, nesterov=nesterov, schedule="constant", warmup_steps=0)
    optimizer = Optimizer(ours, keys, MESH, 10)
    sgd = torch.optim.SGD([theirs.weight], lr=0.05, momentum=0.8, nesterov=nesterov, weight_decay=0.1)
    adamw = torch.optim.AdamW([theirs.bias], lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.2)
    for step in (1, 2, 3):
        for model in (ours, theirs):
            for p in model.parameters():
                p.grad = torch.cos(step * p.detach() * 100)
        optimizer.squared_norm()
        optimizer.update(step, None, torch.tensor(False))
        sgd.step()
        adamw.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert list(optimizer.state(ours.weight)) == ["momentum_buffer"]
