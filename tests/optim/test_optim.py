"""The learning rate, clipping, skipping, and which parameters decay."""

import math
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from meshtrain.cli.memory import held_by_ranks
from meshtrain.config.schema import ParamGroup
from meshtrain.errors import InputError
from meshtrain.layout import Layout
from meshtrain.mesh import build_mesh
from meshtrain.metrics.logger import read
from meshtrain.optim import Optimizer, clip_gradients, grad_norm, rounding
from meshtrain.optim.grad_norm import clip_factor, local_parameters
from meshtrain.optim.lr_schedule import learning_rate
from meshtrain.optim.optimizer import UpdateRule
from meshtrain.optim.registry import OPTIMIZERS, update_rule
from meshtrain.optim.rounding import random_bits, round_stochastically
from meshtrain.parallel.mixed_precision import sum_dtype, sum_dtype_of
from meshtrain.parallel.sharding import ParameterSpec
from meshtrain.trainer import LossScale
from tests.launching import TORCHRUN, Finished, forked, run
from tests.parallel.test_tensor_parallel import assert_none_failed
from tests.parity.experiments import QUICKSTART, SMALL

MESH = build_mesh(Layout({"dp_shard": 1}))


def settings(**keys: object) -> SimpleNamespace:
    values = {
        "name": "adamw",
        "lr": 1.0,
        "min_lr": 0.1,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "weight_decay": 0.5,
        "clip_norm": 1.0,
        "schedule": "cosine",
        "warmup_steps": 10,
        "decay_steps": None,
        "state_precision": "float32",
        "momentum": 0.9,
        "nesterov": True,
        "groups": (),
        "ema_decay": None,
    }
    return SimpleNamespace(**(values | keys))


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_warm_up_reaches_the_rate_at_its_last_update(schedule: str) -> None:
    config = settings(schedule=schedule)
    rates = [learning_rate(config, step, 100) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([n / 10 for n in range(1, 11)])
    assert rates[-1] == pytest.approx(1.0 if schedule == "constant" else 0.1)
    assert all(a >= b for a, b in pairwise(rates[9:])), "after the warm-up it never rises"


def test_the_shapes_of_the_schedules() -> None:
    assert learning_rate(settings(schedule="cosine"), 55, 100) == pytest.approx(0.1 + 0.9 / 2)
    assert learning_rate(settings(schedule="cosine"), 32, 98) == pytest.approx(
        0.1 + 0.9 * (1 + math.cos(math.pi * 22 / 88)) / 2
    )
    assert learning_rate(settings(schedule="linear"), 28, 100) == pytest.approx(0.1 + 0.9 * 0.8)
    wsd = settings(schedule="wsd", decay_steps=20)
    assert learning_rate(wsd, 80, 100) == 1.0
    assert learning_rate(wsd, 90, 100) == pytest.approx(0.55)
    assert learning_rate(settings(schedule="wsd"), 95, 100) == pytest.approx(0.55), "a tenth of the steps by default"
    assert learning_rate(settings(warmup_steps=0), 1, 100) < 1.0


def test_a_run_shorter_than_its_warm_up() -> None:
    assert [learning_rate(settings(), step, 3) for step in (1, 2, 3)] == pytest.approx([0.1, 0.2, 0.3])


def model_with_gradients() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)).double()
    model(torch.randn(5, 4, dtype=torch.float64)).square().sum().backward()
    return model


@pytest.mark.parametrize("model", [nn.SiLU(), nn.Linear(2, 2).requires_grad_(False)], ids=["no weights", "frozen"])
def test_a_stage_with_nothing_to_train(model: nn.Module) -> None:
    """Of a pipeline whose other stages have something."""
    optimizer = Optimizer(model, settings(), MESH, 10)
    optimizer.zero_grad()
    assert optimizer.squared_norm() == 0
    assert optimizer.update(1, torch.tensor(0.5), torch.tensor(False)) == pytest.approx(0.1)
    assert optimizer.updates == 1
    assert clip_gradients(model, MESH, 1.0) == 0


def test_one_update_is_torchs_adamw_with_decay_on_matrices_only() -> None:
    ours, theirs = model_with_gradients(), model_with_gradients()
    optimizer = Optimizer(ours, settings(schedule="constant", warmup_steps=0), MESH, 10)
    optimizer.squared_norm()
    optimizer.update(1, None, torch.tensor(False))
    groups = [
        {"params": [p for p in theirs.parameters() if p.dim() > 1], "weight_decay": 0.5},
        {"params": [p for p in theirs.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8).step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_skipped_update_changes_nothing() -> None:
    model = model_with_gradients()
    optimizer = Optimizer(model, settings(), MESH, 10)
    optimizer.squared_norm()
    optimizer.update(1, None, torch.tensor(False))
    before = [p.detach().clone() for p in model.parameters()]
    state = {
        key: value.clone()
        for key, value in optimizer.rules["adamw"]._adamw.state[optimizer.param_groups[0].parameters[0].local].items()
    }
    for p in model.parameters():
        p.grad = torch.full_like(p, float("nan"))
    optimizer.squared_norm()
    optimizer.update(2, torch.tensor(1.0), torch.tensor(True))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    for key, value in optimizer.rules["adamw"]._adamw.state[optimizer.param_groups[0].parameters[0].local].items():
        assert torch.equal(value, state[key]), key


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("factor", [2.0**-16, 0.3, 1.0])
def test_gradients_are_scaled_in_the_update(dtype: torch.dtype, factor: float) -> None:
    """As if they had been scaled before it: a loss scale, a power of 2, to the bit; clipping in float32 but for the
    rounding of one factor, because the kernel divides by it."""
    ours, theirs = model_with_gradients().to(dtype), model_with_gradients().to(dtype)
    optimizer = Optimizer(ours, settings(schedule="constant", warmup_steps=0, weight_decay=0.0), MESH, 10)
    reference = torch.optim.AdamW(
        theirs.parameters(), lr=1.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, fused=True
    )
    exact = dtype == torch.float64 or factor != 0.3
    for step, skipped in ((1, False), (2, True), (3, False)):
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            a.grad = torch.full_like(a, math.nan) if skipped else torch.cos(step * a.detach() * 100)
            b.grad = torch.cos(step * b.detach() * 100) * factor
        optimizer.squared_norm()
        optimizer.update(step, torch.tensor(factor, dtype=torch.float64), torch.tensor(skipped))
        if not skipped:
            reference.step()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0 if exact else 1e-6, atol=0 if exact else 1e-6)


def test_averages_in_bfloat16_are_right_in_the_mean() -> None:
    """The first step is AdamW's. With a decay whose steps are lost when they are rounded to nearest, the averages of
    many elements still follow gradients up and down."""
    keys: dict[str, Any] = {"schedule": "constant", "warmup_steps": 0, "lr": 1e-3, "betas": (0.9, 0.999)}
    models = [nn.Linear(200, 100) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    exact = Optimizer(models[0], settings(**keys), MESH, 10)
    rounded = Optimizer(models[1], settings(**keys, state_precision="bfloat16"), MESH, 10)
    optimizers = exact, rounded
    for step in range(1, 61):
        skipped = torch.tensor(step == 7)
        for model, optimizer in zip(models, optimizers, strict=True):
            for p in model.parameters():
                p.grad = torch.full_like(p, math.nan if skipped else 3.0 if step < 30 else 0.5)
            optimizer.squared_norm()
            optimizer.update(step, torch.tensor(0.25, dtype=torch.float64), skipped)
        ours, theirs = models[1].weight.detach(), models[0].weight.detach()
        if step == 1:
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)
        assert abs((ours - theirs).mean().item()) < step * 1e-3 * 2e-3, "1e-3 is a step"
        expected = exact.state(models[0].weight)
        for kind, (_, average) in rounded.state(models[1].weight).items():
            assert average.dtype == torch.bfloat16
            assert average.float().mean().item() == pytest.approx(expected[kind][1].mean().item(), rel=2e-3), kind
    assert rounded.updates == exact.updates == 59


def test_random_bits_are_those_of_the_element_wherever_it_lies() -> None:
    whole, update = (7, 5, 3), torch.tensor(3.0)
    bits = random_bits("w", update, whole, (slice(0, 7), slice(0, 5), slice(0, 3)))
    part = (slice(2, 6), slice(1, 2), slice(0, 3))
    assert torch.equal(random_bits("w", update, whole, part), bits[part])
    assert bits.unique().numel() == bits.numel()
    assert not torch.equal(random_bits("v", update, whole, part), bits[part])
    assert not torch.equal(random_bits("w", update + 1, whole, part), bits[part])


def test_stochastic_rounding_keeps_the_mean_and_what_needs_no_rounding() -> None:
    bits = random_bits("w", torch.tensor(1.0), (100_000,), (slice(0, 100_000),))
    for value in (1.0, -3.0, 0.0, 2.0**-130):
        assert torch.equal(round_stochastically(torch.full((9,), value), bits[:9]).float(), torch.full((9,), value))
    for value in (1 + 2**-9, -1 - 3 * 2**-10):
        rounded = round_stochastically(torch.full((100_000,), value), bits >> 16).double()
        assert set(rounded.abs().tolist()) == {1.0, 1 + 2**-7}
        assert rounded.mean().item() == pytest.approx(value, abs=4 * 2**-8 / 100_000**0.5)


def test_an_average_in_bfloat16_is_computed_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which change nothing, as a memory format does not."""
    found = []
    for size, memory_format in (
        (2**22, torch.contiguous_format),
        (20, torch.contiguous_format),
        (20, torch.channels_last),
    ):
        monkeypatch.setattr(rounding, "BLOCK", size)
        torch.manual_seed(0)
        model = nn.ParameterList([torch.randn(5, 3, 2, 2).to(memory_format=memory_format), torch.tensor(0.5)])
        optimizer = Optimizer(model, settings(state_precision="bfloat16"), MESH, 10)
        for step in (1, 2):
            for p in model:
                p.grad = p.detach().sin()
            optimizer.squared_norm()
            optimizer.update(step, None, torch.tensor(False))
        found.append([p.detach().flatten() for p in model])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_an_optimizer_without_rounding_keeps_no_state_in_bfloat16(toy: type[UpdateRule]) -> None:
    with pytest.raises(InputError, match="is built for adamw, not for normalized"):
        Optimizer(nn.Linear(2, 2), settings(name="normalized", state_precision="bfloat16"), MESH, 10)
    keys = settings(state_precision="bfloat16")
    held = held_by_ranks([ParameterSpec("w", (6, 10))], Layout({}), "float64", keys)
    assert held.optimizer_bytes == 2 * 2 * 60


def test_clipping_is_torchs() -> None:
    ours, theirs = model_with_gradients(), model_with_gradients()
    expected = nn.utils.clip_grad_norm_(theirs.parameters(), 0.7)
    assert clip_gradients(ours, MESH, 0.7).item() == pytest.approx(expected.item(), rel=1e-12)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=0)
    assert clip_factor(torch.tensor(0.5), 0.7) == 1.0
    assert clip_factor(torch.tensor(0.5), None) is None


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [
        ((8, 0), torch.float64),  # A100
        ((9, 0), torch.float64),  # H100
        ((10, 0), torch.float64),  # B200
        ((10, 3), torch.float32),  # B300
        ((8, 6), torch.float32),
        ((8, 9), torch.float32),  # L40S
        ((12, 0), torch.float32),
        ((7, 5), torch.float32),
    ],
)
def test_norms_are_summed_in_float64_where_a_gpu_is_made_for_it(
    capability: tuple[int, int], dtype: torch.dtype
) -> None:
    assert sum_dtype_of(capability) == dtype
    assert sum_dtype(torch.device("cpu")) == torch.float64


@pytest.mark.parametrize("also", [torch.float32, torch.float64])
def test_a_norm_summed_in_float32_keeps_the_tolerance(monkeypatch, also: torch.dtype) -> None:
    """And one of gradients in float64 is summed in float64 all the same."""
    torch.manual_seed(0)
    model = nn.ParameterList([*(torch.zeros(1 << 16) for _ in range(8)), torch.zeros(3, dtype=also)])
    for p in model:
        p.grad = (torch.rand(p.shape) ** 8).to(p.dtype)
    exact = torch.cat([p.grad.double() for p in model]).norm()
    assert squared_norm(model).sqrt().item() == pytest.approx(exact.item(), rel=1e-13)
    monkeypatch.setattr(grad_norm, "sum_dtype", lambda device: torch.float32)
    found = squared_norm(model)
    assert found.dtype == torch.float64
    assert found.sqrt().item() == pytest.approx(exact.item(), rel=1e-5 if also == torch.float32 else 1e-13)
    assert (abs(found.sqrt() / exact - 1) > 1e-11) == (also == torch.float32)


def squared_norm(model: nn.Module) -> torch.Tensor:
    return grad_norm.squared_norm(local_parameters(model, MESH), torch.device("cpu"))


@pytest.mark.parametrize("world", [2, 4])
def test_torchs_optimizers_update_split_and_plain_parameters(world: int) -> None:
    """Many tensors at once, as they do on GPUs."""
    assert_none_failed(forked(world, Path(__file__).parent / "optimizer_cases.py"), world, 60)


def test_the_loss_scale_halves_on_overflow_and_doubles_after_good_steps() -> None:
    scale = LossScale(torch.device("cpu"))
    scale.update(torch.tensor(True))
    assert scale.value == LossScale.FIRST / 2
    for _ in range(LossScale.GROWTH - 1):
        scale.update(torch.tensor(False))
    assert scale.value == LossScale.FIRST / 2
    scale.update(torch.tensor(False))
    assert scale.value == LossScale.FIRST
    scale.update(torch.tensor(False))
    assert scale.value == LossScale.FIRST, "the count begins anew"


def test_groups_have_learning_rates_and_decays_of_their_own() -> None:
    ours, theirs = model_with_gradients(), model_with_gradients()
    groups = (ParamGroup("1.*", lr_scale=0.5, weight_decay=0.25), ParamGroup("*", weight_decay=0.0))
    optimizer = Optimizer(ours, settings(schedule="constant", warmup_steps=0, groups=groups), MESH, 10)
    assert [[p.spec.name for p in group.parameters] for group in optimizer.param_groups] == [
        ["0.weight", "0.bias"],
        ["1.weight", "1.bias"],
    ]
    optimizer.squared_norm()
    assert optimizer.update(1, None, torch.tensor(False)) == 1.0
    theirs_in_groups = [
        {"params": list(theirs[0].parameters()), "lr": 1.0, "weight_decay": 0.0},
        {"params": list(theirs[1].parameters()), "lr": 0.5, "weight_decay": 0.25},
    ]
    torch.optim.AdamW(theirs_in_groups, betas=(0.9, 0.95), eps=1e-8).step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> type[UpdateRule]:
    monkeypatch.setitem(OPTIMIZERS, "normalized", "tests.optim.toy_optimizer:NormalizedMomentum")
    return update_rule("normalized")


def test_what_another_optimizer_keeps_is_known_without_a_job(toy: type[UpdateRule]) -> None:
    matrix, vector = ParameterSpec("w", (6, 10)), ParameterSpec("b", (6,))
    held = held_by_ranks([matrix, vector], Layout({}), "float32", settings(name="normalized"))
    assert (held.weight_bytes, held.optimizer_bytes) == (66 * 4, 60 * 4 + 8)
    optimizer = Optimizer(nn.Linear(10, 6), settings(name="normalized"), MESH, 10)
    kept = [kind for p in optimizer.param_groups[0].parameters for kind in optimizer.state(p.parameter)]
    assert kept == ["momentum", "largest"]


def test_a_skipped_update_of_another_optimizer_changes_nothing(toy: type[UpdateRule]) -> None:
    model = model_with_gradients()
    optimizer = Optimizer(model, settings(name="normalized"), MESH, 10)
    optimizer.squared_norm()
    optimizer.update(1, None, torch.tensor(False))
    tensors = [t for group in optimizer.param_groups for p in group.parameters for t in (p.local, *p.state.values())]
    before = [t.detach().clone() for t in tensors]
    assert all(t.abs().sum() > 0 for t in tensors)
    for p in model.parameters():
        p.grad = torch.full_like(p, float("nan"))
    optimizer.squared_norm()
    optimizer.update(2, torch.tensor(1.0), torch.tensor(True))
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    assert optimizer.updates == 1


@pytest.mark.timeout(400)
def test_another_optimizer_trains_and_resumes_on_any_layout(tmp_path: Path) -> None:
    """One class and one line of the registry: the config's check, the norm, checkpoints and layouts follow."""
    script = str(Path(__file__).parent / "toy_optimizer.py")
    two = [*TORCHRUN, "--standalone", "--nproc-per-node=2"]

    def train(command: list[str], output: str, steps: int, *overrides: str) -> list[tuple[float, float]]:
        keys = [*SMALL, "train.precision=float64", "optimizer.name=normalized", "optimizer.schedule=constant"]
        keys += [f"train.steps={steps}", f"train.output={tmp_path}/{output}", "checkpoint.every=3", *overrides]
        run([*command, script, "configs/quickstart.yaml", *keys]).check()
        return [(row["loss"], row["grad_norm"]) for row in read(tmp_path / output / "metrics.jsonl")]

    expected = train([sys.executable], "one", 6)
    assert expected[-1][0] < expected[0][0]
    train(two, "two", 3, "layout={dp_replicate: 2}", "parallel.shard_optimizer=true")  # the rule gets whole matrices
    rows = train(two, "two", 6, "layout={tp: 2}")  # resumed on another layout
    assert [row[0] for row in rows] == pytest.approx([row[0] for row in expected], rel=1e-9)
    assert [row[1] for row in rows] == pytest.approx([row[1] for row in expected], rel=1e-9)


@pytest.mark.timeout(400)
def test_averages_in_bfloat16_are_the_same_on_any_layout_and_in_checkpoints(tmp_path: Path) -> None:
    def train(world: int, output: str, steps: int, *overrides: str) -> Finished:
        keys = [*SMALL, "train.precision=float64", "optimizer.state_precision=bfloat16", "checkpoint.every=3"]
        keys += ["optimizer.schedule=constant", "model.tie_word_embeddings=true", f"train.steps={steps}"]
        command = ("-m", "meshtrain.train", QUICKSTART, *keys, f"train.output={tmp_path}/{output}", *overrides)
        return forked(world, *command)

    train(1, "one", 6).check()
    train(2, "two", 3).check()
    train(2, "two", 6, "layout={pp: 2}").check()  # resumed on another layout, where both stages hold the tied weight
    rows, expected = (read(tmp_path / name / "metrics.jsonl") for name in ("two", "one"))
    for kind in ("loss", "grad_norm"):
        assert [row[kind] for row in rows] == pytest.approx([row[kind] for row in expected], rel=1e-9)
    refused = train(2, "two", 8, "optimizer.state_precision=float32")
    assert "other types: optimizer." in refused.err
    assert "(there BF16, the model's F64)" in refused.err
