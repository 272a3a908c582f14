"""Which held-out samples an evaluation takes."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from meshtrain.data import EvalBatches, Samples
from meshtrain.data.batch import Batch
from meshtrain.evaluate import evaluation_mode, evaluation_set
from tests.data.test_loader import Numbers, values


@dataclass(frozen=True)
class Held:
    """As much of OpenData as an evaluation looks at."""

    validation: Samples
    task: str


@pytest.mark.parametrize(
    ("n", "most", "count"), [(50, 17, 17), (17, 17, 17), (16, 17, 16), (50, None, 50)]
)
def test_an_evaluation_takes_the_same_samples_on_every_number_of_ranks(
    n: int, most: int | None, count: int
) -> None:
    held = Held(Numbers(n), "language")
    samples = evaluation_set(held, most)
    assert (samples is held.validation) == (count == n), "small sets are what they were"
    reference = values(EvalBatches(samples, micro_size=4, rank=0, ranks=1))
    assert len(set(reference)) == count
    assert set(reference) <= set(range(n))
    for ranks in (1, 2, 3, 7):
        parts = (
            values(EvalBatches(samples, micro_size=4, rank=rank, ranks=ranks))
            for rank in range(ranks)
        )
        assert [value for part in parts for value in part] == reference


def test_an_evaluation_has_a_limit_by_default_where_samples_are_tokens() -> None:
    for task, most, count in (
        ("language", None, 2048),
        ("classification", None, 5000),
        ("classification", 100, 100),
    ):
        assert len(evaluation_set(Held(Numbers(5000), task), most)) == count
    spread = np.array(evaluation_set(Held(Numbers(5000), "language"), 1000).indices)
    assert abs(np.histogram(spread, 5, (0, 5000))[0] - 200).max() < 50, "from all over the set"


@pytest.mark.parametrize("last", [True, False])
def test_a_stage_of_a_pipeline_gets_what_it_uses(last: bool) -> None:
    """Targets on the last, inputs everywhere."""
    x = torch.zeros(2, 3)
    batch = Batch({"images": x, "scale": x.clone(), "none": None}, x)
    batch = batch.to(torch.device("meta"), torch.float64, last)
    images, scale, missing = batch.tensors.values()
    assert [x.is_meta for x in (images, scale, batch.targets)] == [True, True, last]
    assert (images.dtype, scale.dtype, missing) == (torch.float64, torch.float64, None)


def test_a_model_trains_on_after_an_evaluation_that_failed() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout())
    model[0].eval()
    with pytest.raises(ValueError, match="no text"), evaluation_mode(model):
        raise ValueError("no text")
    assert [module.training for module in model.modules()] == [True, False, True]
