"""The learning rate, norms and clipping, skipped updates, groups of parameters, and optimizers of
users."""

import math
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import meshtrain
from meshtrain.config import Config, ConfigErrors
from meshtrain.config.schema import ParamGroupSection
from meshtrain.errors import InputError
from meshtrain.foresight.parameters import held_by_ranks
from meshtrain.job.process import Job
from meshtrain.layout import Layout
from meshtrain.loss import sample_losses
from meshtrain.mesh import Mesh, build_mesh
from meshtrain.metrics.logger import read
from meshtrain.optim import clip_gradients, grad_norm, param_groups
from meshtrain.optim.grad_norm import clip_factor, local_parameters
from meshtrain.optim.groups import GroupOptions, group_options
from meshtrain.optim.lr_schedule import learning_rate, warmup_note
from meshtrain.optim.registry import OPTIMIZERS
from meshtrain.parallel import fsdp
from meshtrain.parallel.mixed_precision import sum_dtype, sum_dtype_of
from meshtrain.parallel.sharding import ParameterSpec, local_part
from tests.comparing import ALONE, small_llama, tokens
from tests.launching import TORCHRUN, run
from tests.optim.steps import (
    MESH,
    assert_same,
    config,
    linear_and_norm,
    optimizer_of,
    set_gradients,
    table,
    update,
)
from tests.parity.experiments import QUICKSTART, SMALL

HERE = Path(__file__).parent


# The learning rate --------------------------------------------------------------------------------


def rate(step: int, steps: int = 100, **settings: object) -> float:
    return learning_rate(
        config(**{"lr": 1.0, "min_lr": 0.1, "warmup_steps": 10, **settings}), step, steps
    )


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_warm_up_reaches_the_rate_at_its_last_update(schedule: str) -> None:
    rates = [rate(step, schedule=schedule) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([n / 10 for n in range(1, 11)])
    assert all(a >= b for a, b in pairwise(rates[9:])), "after the warm-up it never rises"
    assert rate(2, steps=3, schedule=schedule) == pytest.approx(0.2), (
        "a run may be shorter than its warm-up"
    )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"schedule": "linear"}, [4 / 4, 3 / 4, 2 / 4, 1 / 4]),
        ({"schedule": "linear", "warmup_steps": 1}, [4 / 4, 3 / 4, 2 / 4, 1 / 4]),
        ({"schedule": "linear", "warmup_steps": 2}, [1 / 2, 3 / 3, 2 / 3, 1 / 3]),
        ({"schedule": "cosine"}, [(1 + math.cos(math.pi * n / 4)) / 2 for n in range(4)]),
        ({"schedule": "wsd", "decay_steps": 1}, [1, 1, 1, 1 / 2]),
        ({"schedule": "wsd", "decay_steps": 3}, [1, 3 / 4, 2 / 4, 1 / 4]),
        ({"schedule": "wsd"}, [1, 1, 1, 1 / 2]),
        ({"schedule": "wsd", "warmup_steps": 4}, [1 / 4, 2 / 4, 3 / 4, 4 / 4]),
        ({"schedule": "constant"}, [1, 1, 1, 1]),
    ],
)
def test_no_update_has_the_rate_0(settings: dict[str, Any], expected: list[float]) -> None:
    """Runs of 4 updates that decay to 0: the rate after the last one would be 0."""
    options = {"min_lr": 0.0, "warmup_steps": 0, **settings}
    assert [rate(step, steps=4, **options) for step in (1, 2, 3, 4)] == pytest.approx(expected)


def test_a_decay_ends_at_the_lowest_rate() -> None:
    """A cosine of 99 updates without warm-up, and the last 19 of 100; wsd decays in a tenth of the
    run by default."""
    cosine = (1 + math.cos(math.pi * 49 / 99)) / 2
    assert rate(50, 99, schedule="cosine", warmup_steps=0) == pytest.approx(0.1 + 0.9 * cosine)
    assert rate(90, schedule="wsd", decay_steps=19) == pytest.approx(0.1 + 0.9 * 11 / 20)
    assert rate(90, schedule="wsd") == 1.0
    assert rate(91, schedule="wsd") == pytest.approx(0.1 + 0.9 * 10 / 11)


def test_a_run_that_ends_in_its_warm_up_says_so() -> None:
    assert warmup_note(config(lr=1.0, warmup_steps=20), 20) is None
    note = warmup_note(config(lr=1e-3, warmup_steps=20), 5)
    assert note == (
        "the run ends in its warm-up: optimizer.warmup_steps is 20, and the run has 5 steps, so "
        "that its learning rate "
        "reaches 0.00025 instead of 0.001"
    )
    shortest = warmup_note(config(lr=1e-3, warmup_steps=2), 1)
    assert shortest is not None
    assert "the run has 1 step, so" in shortest


# Norms --------------------------------------------------------------------------------------------


def test_clipping_is_torchs() -> None:
    ours, theirs = linear_and_norm(), linear_and_norm()
    for model in (ours, theirs):
        set_gradients(model, 1)
    expected = nn.utils.clip_grad_norm_(theirs.parameters(), 0.7)
    assert clip_gradients(ours, MESH, 0.7).item() == pytest.approx(expected.item(), rel=1e-12)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=0)
    assert clip_factor(torch.tensor(0.5), 0.7) == 1.0
    assert clip_factor(torch.tensor(0.5), None) is None


def test_norms_are_summed_in_float64_where_a_gpu_is_made_for_it() -> None:
    a100, h100, b200 = (8, 0), (9, 0), (10, 0)
    a10, l40s, b300 = (8, 6), (8, 9), (10, 3)
    assert {sum_dtype_of(capability) for capability in (a100, h100, b200)} == {torch.float64}
    assert {sum_dtype_of(capability) for capability in (a10, l40s, b300, (12, 0), (7, 5))} == {
        torch.float32
    }
    assert sum_dtype(torch.device("cpu")) == torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_norm_summed_in_float32_keeps_the_tolerance(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """And one of gradients of which some are in float64 is summed in float64 all the same."""
    torch.manual_seed(0)
    model = nn.ParameterList(
        [*(torch.zeros(1 << 16) for _ in range(8)), torch.zeros(3, dtype=dtype)]
    )
    for p in model:
        p.grad = (torch.rand(p.shape) ** 8).to(p.dtype)

    def norm() -> torch.Tensor:
        return grad_norm.squared_norm(local_parameters(model, MESH), torch.device("cpu")).sqrt()

    exact = torch.cat([p.grad.double() for p in model]).norm()
    torch.testing.assert_close(norm(), exact, rtol=1e-13, atol=0)
    monkeypatch.setattr(grad_norm, "sum_dtype", lambda device: torch.float32)
    torch.testing.assert_close(
        norm(), exact, rtol=1e-5 if dtype == torch.float32 else 1e-13, atol=0
    )
    assert (abs(norm() / exact - 1) > 1e-11) == (dtype == torch.float32)


# Updates ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model", [nn.SiLU(), nn.Linear(2, 2).requires_grad_(False)], ids=["no weights", "frozen"]
)
def test_a_stage_with_nothing_to_train(model: nn.Module) -> None:
    """Of a pipeline whose other stages have something."""
    optimizer = optimizer_of(model, lr=0.1)
    optimizer.zero_grad()
    assert optimizer.squared_norm() == 0
    assert update(optimizer, 1, torch.tensor(0.5)) == 0.1
    assert optimizer.updates == 1
    assert clip_gradients(model, MESH, 1.0) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("factor", [2.0**-16, 0.3, 1.0])
def test_gradients_are_scaled_in_the_update(dtype: torch.dtype, factor: float) -> None:
    """As if they had been scaled before it: a loss scale, a power of 2, to the bit; clipping in
    float32 but for the rounding of one factor, because the kernel divides by it. A step that is
    skipped changes nothing."""
    ours, theirs = linear_and_norm().to(dtype), linear_and_norm().to(dtype)
    optimizer = optimizer_of(ours, lr=1.0, weight_decay=0.0)
    reference = torch.optim.AdamW(
        theirs.parameters(), lr=1.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    tolerance = 0 if dtype == torch.float64 or factor != 0.3 else 1e-6
    for step in (1, 2, 3):
        skip = step == 2
        set_gradients(ours, step, math.nan if skip else 1.0)
        set_gradients(theirs, step, factor)
        update(optimizer, step, torch.tensor(factor, dtype=torch.float64), skip)
        if not skip:
            reference.step()
        assert_same(ours, theirs, tolerance, tolerance)


@pytest.fixture
def normalized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers a user's optimizer."""
    monkeypatch.setitem(OPTIMIZERS, "normalized", "tests.optim.toy_optimizer:NormalizedMomentum")


@pytest.mark.usefixtures("normalized")
@pytest.mark.parametrize("name", ["adamw", "adamw bfloat16", "muon", "sgd", "normalized"])
def test_a_skipped_update_changes_nothing(name: str) -> None:
    model = linear_and_norm()
    rounded = {"state_precision": "bfloat16"} if "bfloat16" in name else {}
    optimizer = optimizer_of(model, name=name.split()[0], **rounded)
    set_gradients(model, 1)
    update(optimizer, 1)
    tensors = [
        t
        for group in optimizer.param_groups
        for p in group.parameters
        for t in (p.local, *p.state.values())
    ]
    before = [tensor.detach().clone() for tensor in tensors]
    assert all(tensor.any() for tensor in tensors)
    set_gradients(model, 2, math.nan)
    update(optimizer, 2, torch.tensor(1.0), skip=True)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    assert optimizer.updates == 1


def trained(mesh: Mesh, optimizer_class: Any, options: dict[str, Any]) -> nn.Module:
    """In a user's loop."""
    model = meshtrain.parallelize(small_llama(), mesh, precision="float64")
    optimizer = optimizer_class(param_groups(model), lr=1e-2, **options)
    samples = tokens().chunk(mesh.size("dp_shard"))[mesh.index("dp_shard")]
    for _ in range(3):
        sample_losses(model(samples), samples).sum().backward()
        clip_gradients(model, mesh, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(
    ("optimizer_class", "options"),
    [
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.SGD, {"foreach": True, "momentum": 0.9}),
    ],
)
def test_torchs_optimizers_update_split_and_plain_parameters(
    job: Job, optimizer_class: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many tensors at once, as they do on GPUs; on 4 ranks each block is a unit of FSDP."""
    monkeypatch.setattr(fsdp, "MIN_UNIT_SIZE", 0)
    mesh = build_mesh(Layout({"dp_shard": job.world_size // 2, "tp": 2}))
    plain = trained(ALONE, optimizer_class, options)
    for name, parameter in trained(mesh, optimizer_class, options).named_parameters():
        part, where = local_part(parameter)
        torch.testing.assert_close(
            part, plain.get_parameter(name)[where], rtol=1e-9, atol=1e-12, msg=name
        )


# A user's optimizer -------------------------------------------------------------------------------


@pytest.mark.usefixtures("normalized")
def test_what_another_optimizer_keeps_is_known_without_a_job() -> None:
    matrix, vector = ParameterSpec("w", (6, 10)), ParameterSpec("b", (6,))
    held = held_by_ranks([matrix, vector], Layout({}), "float32", config(name="normalized"))
    assert (held.weight_bytes, held.optimizer_bytes) == (66 * 4, 60 * 4 + 8)
    layer = nn.Linear(10, 6)
    assert list(optimizer_of(layer, name="normalized").state(layer.weight)) == [
        "momentum",
        "largest",
    ]
    with pytest.raises(InputError, match="is built for adamw, not for normalized"):
        optimizer_of(layer, name="normalized", state_precision="bfloat16")
    assert (
        held_by_ranks(
            [matrix], Layout({}), "float64", config(state_precision="bfloat16")
        ).optimizer_bytes
        == 4 * 60
    )


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_another_optimizer_trains_and_resumes_on_any_layout(tmp_path: Path) -> None:
    """One class and one line of the registry: the config's check, the norm, checkpoints and layouts
    follow."""
    two = [*TORCHRUN, "--standalone", "--nproc-per-node=2"]

    def train(command: list[str], output: str, steps: int, *overrides: str) -> list[float]:
        keys = [
            *SMALL,
            "train.precision=float64",
            "optimizer.name=normalized",
            "optimizer.schedule=constant",
        ]
        keys += [
            f"train.steps={steps}",
            f"train.output={tmp_path}/{output}",
            "checkpoint.every=3",
            *overrides,
        ]
        run([*command, str(HERE / "toy_optimizer.py"), "configs/quickstart.yaml", *keys]).check()
        rows = read(tmp_path / output / "metrics.jsonl")
        return [row[name] for name in ("loss", "grad_norm") for row in rows]

    expected = train([sys.executable], "one", 6)
    assert expected[5] < expected[0]
    # the rule gets whole matrices
    train(two, "two", 3, "layout={dp_replicate: 2}", "parallel.shard_optimizer=true")
    # resumed on another layout
    assert train(two, "two", 6, "layout={tp: 2}") == pytest.approx(expected, rel=1e-9)


# Groups of parameters -----------------------------------------------------------------------------


def test_the_first_group_that_matches_counts() -> None:
    groups = (
        ParamGroupSection("*.bias", weight_decay=0.5),
        ParamGroupSection("0.*", lr=0.1, name="sgd"),
        ParamGroupSection("*", lr_scale=0.25),
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
        groups = (
            (ParamGroupSection(row["group"][0], name=row["group"][1]),) if "group" in row else ()
        )
        options = group_options(
            config(name="muon", groups=groups), ParameterSpec(row["name"], tuple(row["shape"]))
        )
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
        ParamGroupSection("0.weight", name="sgd", lr=0.05),
        ParamGroupSection("0.bias", weight_decay=0.2),
        ParamGroupSection("*", lr_scale=0.5),
    )
    optimizer = optimizer_of(ours, lr=0.1, groups=groups, momentum=0.8, nesterov=nesterov)
    sgd = torch.optim.SGD(
        [theirs[0].weight], lr=0.05, momentum=0.8, nesterov=nesterov, weight_decay=0.1
    )
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
