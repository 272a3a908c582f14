"""Judges, by what is made up: planted mistakes are in test_mistakes.py."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from meshtrain.layout import Layout
from meshtrain.verify.compare import Difference, RankStep
from meshtrain.verify.kinds import KINDS, Evidence, judge
from meshtrain.verify.recording import Held

SAMPLES = 4


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


PARTS = drawn(SAMPLES, 6, 3)  # what each sample adds to a gradient
BEFORE = drawn(6, 3, seed=1)
UPDATE = 1e-3 * drawn(6, 3, seed=2)
WHOLE = {"gradient/w": PARTS.sum(0), "before/w": BEFORE, "weight/w": BEFORE + UPDATE}
NUMBERS = {"loss": 2.0, "grad_norm": float(PARTS.sum(0).norm()), "tokens": 40}


def evidence(
    what: str,
    *own: Mapping[str, Tensor],
    layout: Mapping[str, int] | None = None,
    step: int = 1,
    **more: Any,
) -> Evidence:
    """Of a step in which each rank has held whole tensors."""
    layout = layout or {"dp_replicate": 2}
    place = (slice(0, 6), slice(0, 3))
    tensors = [
        {name: Held(place, value) for name, value in (WHOLE | dict(rank)).items()} for rank in own
    ]
    shares = [RankStep(step, first=2 * rank, real=2, scales={"w": 1.0}) for rank in range(len(own))]
    values: dict[str, Any] = {
        "layout": Layout(layout),
        "step": step,
        "differences": [
            Difference(step, what, 0.5, "w" if what in ("gradient", "weight") else None)
        ],
        "expected": [RankStep(step, real=SAMPLES, scales={"w": 1.0})],
        "ranks": shares,
        "numbers": NUMBERS,
        "expected_numbers": NUMBERS,
        "whole": WHOLE,
        "own": tensors,
        "contributions": lambda: {"w": PARTS},
    }
    return Evidence(**(values | more))


def gradient(value: Tensor) -> dict[str, Tensor]:
    return {"gradient/w": value}


def weight(value: Tensor) -> dict[str, Tensor]:
    return {"weight/w": value}


G = PARTS.sum(0)
CASES = {
    "factor": evidence("gradient", gradient(G * 2), gradient(G * 2)),
    "missing sum": evidence("gradient", gradient(PARTS[:2].sum(0)), gradient(PARTS[2:].sum(0))),
    "missing sample": evidence("gradient", gradient(PARTS[1:].sum(0)), gradient(PARTS[1:].sum(0))),
    "repeated sample": evidence("gradient", gradient(G + PARTS[0]), gradient(G + PARTS[0])),
    "weighting": evidence(
        "gradient",
        *[gradient((PARTS * torch.tensor([1.2, 1.2, 0.7, 0.7])[:, None, None]).sum(0))] * 2,
    ),
    "misplaced": evidence("gradient", gradient(G.flip(0)), gradient(G.flip(0))),
    "rounding": evidence("gradient", *[gradient(G.bfloat16().double())] * 2),
    "gradient": evidence("gradient", *[gradient(G + drawn(6, 3, seed=5))] * 2),
    "initial values": evidence("weight", weight(BEFORE), weight(BEFORE), step=0),
    "stale copies": evidence("weight", weight(BEFORE), weight(BEFORE + UPDATE)),
    "weight decay": evidence("weight", *[weight(BEFORE + UPDATE - 1e-4 * BEFORE)] * 2),
    "learning rate": evidence("weight", *[weight(BEFORE + 1.5 * UPDATE)] * 2),
    "update": evidence("weight", *[weight(BEFORE + drawn(6, 3, seed=6))] * 2),
    "norm": evidence("grad_norm", {}, {}, numbers=NUMBERS | {"grad_norm": 9.0}),
    "forward": evidence("loss", {}, {}, numbers=NUMBERS | {"loss": 3.0}),
    "random numbers": evidence(
        "loss", {}, {}, numbers=NUMBERS | {"loss": 3.0}, equal_without_dropout=lambda: True
    ),
    "metric": evidence("loss/router", {}, {}),
}


@pytest.mark.parametrize("kind", CASES)
def test_what_is_made_up_is_called_by_its_name(kind: str) -> None:
    finding = judge(CASES[kind])
    assert finding.kind == kind
    assert finding.kind in KINDS
    assert finding.reason


def test_a_factor_names_the_axis_of_its_size() -> None:
    assert "the size of dp_replicate" in judge(CASES["factor"]).reason
    half = evidence("gradient", *[gradient(G / 2)] * 2)
    assert "1 / the size of dp_replicate" in judge(half).reason


def test_samples_are_named_by_their_places() -> None:
    assert "position 0 of the global batch" in judge(CASES["missing sample"]).reason


def test_a_loss_that_is_no_sum_over_samples_is_not_explained_by_them() -> None:
    """What each sample adds does not add up to the gradient."""
    finding = judge(
        evidence(
            "gradient", *[gradient(PARTS[1:].sum(0))] * 2, contributions=lambda: {"w": 2 * PARTS}
        )
    )
    assert finding.kind == "gradient"


def test_a_small_difference_is_rounding_only_where_digits_are_missing() -> None:
    """A softmax over a split vocabulary whose parts were scaled a little wrong is no rounding."""
    finding = judge(evidence("gradient", *[gradient(G + 3e-3 * drawn(6, 3, seed=5))] * 2))
    assert finding.kind == "gradient"
    assert "16 bits" in finding.reason  # said aloud, and not believed
    rounded = sum(part.bfloat16().double() for part in PARTS)  # by each rank, before their sum
    assert judge(evidence("gradient", *[gradient(rounded)] * 2)).kind == "rounding"


def test_a_stage_with_right_gradients_does_not_hide_what_another_one_lacks() -> None:
    place = (slice(0, 6), slice(0, 3))
    first = {"gradient/v": Held(place, G)}
    last = {"gradient/w": Held(place, PARTS[:3].sum(0))}
    lacking = evidence("gradient", {}, {}, layout={"pp": 2}, own=[first, last])
    finding = judge(lacking)
    assert finding.kind == "missing sample"
    assert "position 3 of the global batch" in finding.reason


def test_targets_without_a_loss_are_counted() -> None:
    finding = judge(evidence("tokens", {}, {}, numbers=NUMBERS | {"tokens": 36}))
    assert finding.kind == "missing sample"
    assert finding.reason == "36 targets have a loss in the place of 40"


# What looks like another kind ----------------------------------------------------------------------


def with_losses(of_ranks: list[list[float]], of_one: list[float], **more: Any) -> Evidence:
    """Of a step in which two ranks have halves of the samples."""
    ranks = [
        RankStep(1, first=2 * rank, real=2, losses=losses, speaks=True)
        for rank, losses in enumerate(of_ranks)
    ]
    expected = [RankStep(1, real=SAMPLES, losses=of_one, speaks=True)]
    return evidence("sample_loss", {}, {}, ranks=ranks, expected=expected, **more)


def test_losses_that_differ_by_little_are_no_mean_of_means() -> None:
    """By more than rounding, and by less than a judge of values looks at."""
    little = 1 + 1e-7
    finding = judge(with_losses([[2.0 * little, 1.0], [3.0, 2.0]], [2.0, 1.0, 3.0, 2.0]))
    assert finding.kind == "forward"
    assert "the loss of some samples" in finding.reason


def test_a_mean_that_differs_alone_is_a_weighting() -> None:
    found = with_losses(
        [[2.0, 1.0], [3.0, 2.0]],
        [2.0, 1.0, 3.0, 2.0],
        differences=[Difference(1, "loss", 0.25)],
        numbers=NUMBERS | {"loss": None},
    )
    finding = judge(found)
    assert finding.kind == "weighting"
    assert "no number in the place of 2" in finding.reason


def test_noise_is_no_weighting_and_nothing_misplaced() -> None:
    """Its size is that of float32, and every sample counts once."""
    noise = 1e-7 * drawn(6, 3, seed=8)
    found = evidence("gradient", *[gradient(G + noise)] * 2, layout={"cp": 2})
    assert judge(found).kind == "gradient"


def test_a_gradient_with_as_many_elements_as_samples_is_no_sum_of_them() -> None:
    parts = drawn(SAMPLES, 2, 2, seed=9)
    place = (slice(0, 2), slice(0, 2))
    own = {"gradient/w": Held(place, drawn(2, 2, seed=10))}
    found = evidence(
        "gradient",
        whole={"gradient/w": parts.sum(0)},
        own=[own, own],
        contributions=lambda: {"w": parts},
    )
    assert judge(found).kind == "gradient"


def test_a_stage_whose_gradients_are_right_does_not_hide_what_another_lacks() -> None:
    """It has written its own, since the norm, and so its update, is another."""
    right = {"gradient/v": Held((slice(0, 3),), torch.ones(3, dtype=torch.float64))}
    wrong = {"gradient/w": Held((slice(0, 6), slice(0, 3)), PARTS[1:].sum(0))}
    ranks = [RankStep(1, real=SAMPLES)] * 2
    found = evidence("gradient", layout={"pp": 2}, own=[right, wrong], ranks=ranks)
    finding = judge(found)
    assert (finding.kind, finding.parameter) == ("missing sample", "w")


def test_gradients_that_are_no_numbers() -> None:
    nothing = torch.full_like(G, math.nan)
    assert judge(evidence("gradient", gradient(nothing), gradient(nothing))).kind == "gradient"


def test_a_norm_that_is_no_number() -> None:
    finding = judge(evidence("grad_norm", {}, {}, numbers=NUMBERS | {"grad_norm": None}))
    assert finding.kind == "norm"
    assert finding.reason.startswith("it is no number")


def test_weights_that_are_no_numbers_on_every_rank_are_not_stale() -> None:
    nothing = torch.full_like(BEFORE, math.nan)
    assert judge(evidence("weight", weight(nothing), weight(nothing))).kind == "update"


def test_a_part_that_is_right_has_lost_nothing() -> None:
    """The rank has written it because another of its parameters differs."""
    upper, lower = (slice(0, 3), slice(0, 3)), (slice(3, 6), slice(0, 3))
    right = {"weight/w": Held(upper, (BEFORE + UPDATE)[:3])}
    wrong = {"weight/w": Held(lower, (BEFORE + drawn(6, 3, seed=6))[3:])}
    found = evidence("weight", layout={"dp_shard": 2}, own=[right, wrong])
    assert judge(found).kind == "update"


def test_too_little_decay_says_so() -> None:
    finding = judge(evidence("weight", *[weight(BEFORE + UPDATE + 1e-4 * BEFORE)] * 2))
    assert finding.kind == "weight decay"
    assert finding.reason == "w has lost 0.0001 of its value less than it should"


def test_a_parameter_that_one_process_does_not_have() -> None:
    own = {"gradient/v": Held((slice(0, 3),), torch.ones(3, dtype=torch.float64))}
    missing = [Difference(1, "gradient", math.inf, "v")]
    found = evidence("gradient", own=[own, own], differences=missing)
    assert judge(found).kind == "gradient"


def test_samples_in_another_order_and_with_other_contents() -> None:
    def reading(*samples: tuple[int, int, str]) -> list[RankStep]:
        return [RankStep(1, samples=samples, real=len(samples))]

    one, two, other = (0, 1, "one"), (0, 2, "two"), (0, 2, "other")
    found = evidence("samples_digest", {}, expected=reading(one, two), ranks=reading(two, one))
    assert judge(found).reason == "the same samples are read in another order"
    found = replace(found, ranks=reading(one, other))
    assert judge(found).reason == "sample 2 read with other contents"
