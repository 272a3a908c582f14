"""A loss of one's own: the same curve, metrics and evaluation on every layout as in one process."""

from dataclasses import replace
from pathlib import Path

import pytest

from meshtrain.job.process import Job
from tests import ranks
from tests.parity.experiments import (
    QUICKSTART,
    SMALL,
    Experiment,
    overrides_of,
    write_ragged,
)
from tests.parity.runs import assert_parity

# 14 samples: neither 3 ranks nor microbatches of 4 divide them.
EXACT = (
    "train.precision=float64",
    "train.steps=4",
    "train.eval_every=4",
    "train.eval_samples=9",
    "data.workers=0",
    "batch.global_size=14",
    "batch.micro_size=4",
    "optimizer.warmup_steps=2",
)
SMALL_LLAMA = (
    "model.hidden_size=48",
    "model.intermediate_size=112",
    "train.sample_tokens=0",
    "parallel.recompute=full",
)
EXPERIMENTS = {
    name: Experiment(name, f"configs/{name}.yaml", (*EXACT, *more), 1e-9, falls_to)
    for name, more, falls_to in (
        ("regression", (), 0.97),
        ("multi-label", (), 1.0),
        ("weighted-tokens", SMALL_LLAMA, 0.97),
    )
}
# Over `cp` 23 tokens are padded to 24.
EXPERIMENTS["padded"] = replace(
    EXPERIMENTS["weighted-tokens"],
    name="padded",
    overrides=(*EXPERIMENTS["weighted-tokens"].overrides, "data.seq_len=23"),
)
EXAMPLES = ("regression", "multi-label", "weighted-tokens")
# The examples on every kind of layout; one microbatch where the rank's whole share is one.
LAYOUTS = (
    (2, "{dp_replicate: 2}", ()),
    (2, "{dp_shard: 2}", ("batch.micro_size=7",)),
    (2, "{tp: 2}", ()),
    (2, "{pp: 2}", ()),
    (3, "{dp_shard: 3}", ()),
    (3, "{dp_replicate: 3}", ("batch.micro_size=1",)),
)
OF_TOKENS = (
    (2, "{cp: 2}", ()),
    (2, "{tp: 2}", ("parallel.sequence_parallel=false",)),
    (2, "{dp_shard: 2}", ("parallel.compile=true",)),
    (2, "{pp: 2}", ("pipeline.schedule=zbv", "batch.micro_size=3")),
)


OF_FOUR = (
    (4, "{dp_replicate: 2, dp_shard: 2}", ("parallel.recompute=full",)),
    (4, "{pp: 2, tp: 2}", ("pipeline.schedule=gpipe",)),
)
# Terms that experts attach are divided by the same weights; prompts without a loss leave many
# samples without one.
OF_EXPERTS = (
    (2, "{dp_shard: 2}", ("batch.micro_size=4",)),
    (2, "{tp: 2}", ()),
    (2, "{cp: 2}", ()),
    (2, "{pp: 2}", ()),
    (3, "{dp_replicate: 3}", ("batch.micro_size=3",)),
)
# The default weight, 1 for a sample, counts once, though each rank of `cp` has a part of it.
EXPERIMENTS["samples"] = replace(
    EXPERIMENTS["weighted-tokens"],
    name="samples",
    overrides=(
        *EXPERIMENTS["weighted-tokens"].overrides,
        "model.name=tests/models/own_loss_of_samples.py",
    ),
)
# Five samples one by one: a rank has none for its last microbatch, whose logits are split.
EXPERIMENTS["five"] = replace(
    EXPERIMENTS["weighted-tokens"],
    name="five",
    overrides=(
        *EXPERIMENTS["weighted-tokens"].overrides,
        "batch.global_size=5",
        "batch.micro_size=1",
    ),
)


def experts(folder: Path) -> Experiment:
    data = write_ragged(folder / "ragged.jsonl")
    keys = (
        *SMALL,
        *overrides_of("qwen3_moe"),
        "model.name=tests/models/own_loss.py",
        "data.source=jsonl",
        f"data.path={data}",
        f"data.cache={folder / 'cache'}",
        "data.validation=0.03",
        *EXACT,
    )
    return Experiment("experts with a loss of their own", QUICKSTART, keys, 1e-9, 0.97)


def cells() -> list:
    rows = [(*layout, name) for name in EXAMPLES for layout in LAYOUTS]
    rows += [(*layout, "weighted-tokens") for layout in OF_TOKENS]
    rows += [(2, "{cp: 2}", (), "padded"), (2, "{cp: 2}", (), "samples")]
    rows += [(*layout, "experts") for layout in OF_EXPERTS]
    # The promise needs few of them; the others are for `make test-all`.
    rows += [(*layout, name) for name in EXAMPLES for layout in OF_FOUR]
    rows.append((4, "{dp_shard: 2, tp: 2}", (), "five"))
    return [
        ranks.row(
            world,
            layout,
            more,
            name,
            name=f"{name} {layout} {' '.join(more)}".strip(),
            # One example shows DDP; the sums of the others are the same.
            slow=world == 4 or ("dp_replicate" in layout and name != "regression"),
        )
        for world, layout, more, name in rows
    ]


@pytest.mark.parametrize(("job", "layout", "more", "name"), cells(), indirect=["job"])
def test_same_curve_as_one_process(
    job: Job, layout: str, more: tuple[str, ...], name: str, shared_path: Path, session_path: Path
) -> None:
    experiment = EXPERIMENTS.get(name) or experts(session_path)
    assert_parity(job, experiment, [*more, f"layout={layout}"], shared_path, session_path)
