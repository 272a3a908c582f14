"""Packed documents with variable-length attention, as on GPUs: runs have the same losses as with a mask."""

import json
from pathlib import Path

from tests.parity.cells import assert_same, train
from tests.parity.experiments import QUICKSTART, SMALL, Experiment


def test_runs_with_lengths_have_the_losses_of_runs_with_masks(tmp_path: Path) -> None:
    texts = [f"{i} " * (1 + i * i % 17) for i in range(400)]  # each sample of 48 tokens has a few texts, or part of one
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = ("data.source=jsonl", f"data.path={tmp_path / 'texts.jsonl'}", "data.mask_documents=true")
    keys = (*data, f"data.cache={tmp_path / 'cache'}", "train.precision=float64", "train.steps=3", "train.eval_every=3")
    packed = Experiment("packed", QUICKSTART, (*SMALL, *keys), 1e-9)
    layouts = {
        "dp": ("{dp_shard: 2}", ("parallel.recompute=selective",)),
        "tp": ("{tp: 2}", ("parallel.recompute=full",)),
        "pp": ("{pp: 2}", ()),
    }
    train(tmp_path, 1, [(packed, "masked", "{}", ()), (packed, "whole", "{}", ("data.mask_documents=false",))])
    train(tmp_path, 2, [(packed, name, *layout) for name, layout in layouts.items()], script="varlen_cells.py")
    reference, whole, *others = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("masked", "whole", *layouts)
    )
    assert abs(whole[-1]["loss"] / reference[-1]["loss"] - 1) > 1e-4, "documents show"
    for rows in others:
        assert_same(rows, reference, packed.tolerance)
