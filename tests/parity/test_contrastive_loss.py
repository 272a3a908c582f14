"""A loss that compares the samples of a step: the same curve and evaluation on every layout as in
one process."""

from pathlib import Path

import pytest

from meshtrain.job.process import Job
from tests import ranks
from tests.parity.experiments import Experiment
from tests.parity.runs import assert_parity
from tests.parity.test_own_loss import EXACT

# 16 samples, which 3 ranks do not divide; of 18 in an evaluation the last 2 meet each other.
KEYS = (*EXACT, "batch.global_size=16", "batch.micro_size=16", "train.eval_samples=18")
EXPERIMENTS = {
    name: Experiment(name, f"configs/{name}.yaml", (*KEYS, *more), 1e-9, 1.0)
    for name, more in (("clip", ()), ("simclr", ("model.channels=[4, 8, 8]",)))
}
# On 3 ranks, one has no sample; of two pairs others in each step, no loss need fall.
FEW = ("batch.global_size=2", "batch.micro_size=2")
EXPERIMENTS["few"] = Experiment("few", "configs/clip.yaml", (*KEYS, *FEW), 1e-9, falls_to=1e9)
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
    """One of the examples, and, slow but for a few layouts, the other."""
    rows = []
    for layout in ("{dp_shard: 3}", "{dp_replicate: 3}"):
        more = ("batch.micro_size=1",)
        rows.append(ranks.row(3, layout, more, "few", name=f"few {layout}"))
    for name in ("clip", "simclr"):
        for world, layout, more in LAYOUTS:
            if name == "simclr" and "tp" in layout:  # convolutions are not split
                continue
            is_slow = name == "simclr" and layout not in ("{dp_shard: 3}", "{pp: 2}")
            text = f"{name} {layout} {' '.join(more)}".strip()
            rows.append(ranks.row(world, layout, more, name, name=text, slow=is_slow))
    return rows


@pytest.mark.parametrize(("job", "layout", "more", "name"), cells(), indirect=["job"])
def test_same_curve_as_one_process(
    job: Job, layout: str, more: tuple[str, ...], name: str, shared_path: Path, session_path: Path
) -> None:
    experiment = EXPERIMENTS[name]
    assert_parity(job, experiment, [*more, f"layout={layout}"], shared_path, session_path)
