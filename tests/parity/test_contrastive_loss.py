"""A loss that compares the samples of a step: the same curve and evaluation on every layout as in
one process, and what is refused before the first step."""

from pathlib import Path

import pytest

from meshtrain.job.process import Job
from tests import ranks
from tests.parity.experiments import Experiment
from tests.parity.runs import assert_parity
from tests.parity.test_own_loss import EXACT

# 16 samples, which 3 ranks do not divide; of 21 in an evaluation the last 5 meet each other.
KEYS = (*EXACT, "batch.global_size=16", "batch.micro_size=16", "train.eval_samples=21")
EXPERIMENTS = {
    name: Experiment(name, f"configs/{name}.yaml", (*KEYS, *more), 1e-9, 1.0)
    for name, more in (("clip", ()), ("simclr", ("model.channels=[4, 8, 8]",)))
}
# A rank's share may be smaller than micro_size.
LAYOUTS = (
    (2, "{dp_replicate: 2}", ("batch.micro_size=8",)),
    (2, "{dp_shard: 2}", ("batch.micro_size=9",)),
    (2, "{tp: 2}", ()),
    (2, "{pp: 2}", ()),
    (3, "{dp_shard: 3}", ("batch.micro_size=6",)),
    (3, "{dp_replicate: 3}", ("batch.micro_size=6",)),
    (4, "{dp_replicate: 2, dp_shard: 2}", ("batch.micro_size=4",)),
    (4, "{dp_shard: 2, tp: 2}", ("batch.micro_size=8",)),
    (4, "{pp: 2, dp_shard: 2}", ("batch.micro_size=8",)),
)


def cells() -> list:
    return [
        ranks.row(world, layout, more, name, name=f"{name} {layout} {' '.join(more)}".strip())
        for name in EXPERIMENTS
        for world, layout, more in LAYOUTS
        if name == "clip" or "tp" not in layout  # convolutions are not split
    ]


@pytest.mark.parametrize(("job", "layout", "more", "name"), cells(), indirect=["job"])
def test_same_curve_as_one_process(
    job: Job, layout: str, more: tuple[str, ...], name: str, shared_path: Path, session_path: Path
) -> None:
    experiment = EXPERIMENTS[name]
    assert_parity(job, experiment, [*more, f"layout={layout}"], shared_path, session_path)
