"""In a job: ten steps of a class of transformers in a loop of its own, and by meshtrain's command
from the same weights.

    beside_own_loop.py FOLDER CONFIG [OVERRIDE ...]     FOLDER has the weights; own.json comes there
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

import meshtrain.train
from meshtrain.config import Config
from meshtrain.data.order import batch_samples
from meshtrain.job.environment import read_environment
from meshtrain.job.exit import job_exit
from meshtrain.job.process import join
from tests.float64_inside import keep_float64
from tests.fuzz.answers import Answers

BATCH, STEPS, SEED, LR, CLIP = 6, 10, 3, 2e-3, 0.5


def dataset(config: Any, split: str) -> Answers:
    """The data of the run: the same samples in each step, so that a model learns them."""
    return Answers(0 if split == "train" else BATCH, BATCH)


def own_loop(folder: Path) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step. Nothing of meshtrain's is in it but the order of the
    samples."""
    # `dtype` leaves buffers in float32, of which angles are computed.
    # Its grouped products of experts have no float64.
    options = {"dtype": torch.float64, "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, **options).double()
    model.train()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    data = dataset(None, "train")
    steps = []
    for step in range(STEPS):
        samples = [data[i] for i in batch_samples(SEED, step, BATCH, len(data))]
        tokens = torch.stack([tokens for tokens, _ in samples])
        targets = torch.stack([targets for _, targets in samples])
        logits = model(input_ids=tokens, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        steps.append((loss.item(), norm.item()))
    return steps


def main(folder: str, config: str, *overrides: str) -> None:
    keep_float64("transformers")
    job = join(read_environment(os.environ))
    with job_exit(job):
        if job.rank == 0:
            (Path(folder) / "own.json").write_text(json.dumps(own_loop(Path(folder))))
        loaded = Config.load(config, overrides, world_size=job.world_size, for_training=True)
        meshtrain.train.run(loaded, job)


if __name__ == "__main__":
    main(*sys.argv[1:])
