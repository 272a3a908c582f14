"""Ten steps of the command against a loop written by hand, on a Megatron file: nothing of
meshtrain's is in that loop but the plain model, its first weights and the order of the samples."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from meshtrain.data.order import batch_samples
from meshtrain.job.locate import model_file
from meshtrain.metrics.logger import read
from meshtrain.modeling.init import initialise
from tests.data.files import write_pair
from tests.launching import forked

SEQ, BATCH, STEPS, SEED = 32, 10, 10, 3
LR, WARMUP, CLIP = 2e-3, 4, 0.5
KEYS = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}


def documents() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 30, size=n).tolist() for n in rng.integers(5, 400, size=40)]


def plain_loop(tokens: np.ndarray) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step."""
    llama = model_file("llama")
    model = llama.Model(llama.Config(**KEYS))
    initialise(model, llama.init_plan, seed=SEED, std=0.02)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    steps = []
    for step in range(STEPS):
        samples = batch_samples(SEED, step, BATCH, (len(tokens) - 1) // SEQ)
        rows = torch.tensor(np.stack([tokens[i * SEQ : i * SEQ + SEQ + 1] for i in samples]))
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / WARMUP)
        optimizer.step()
        steps.append((loss.item(), norm.item()))
    return steps


@pytest.mark.parametrize("processes", [1, 3])
def test_ten_steps_agree_with_a_plain_loop(processes: int, tmp_path: Path) -> None:
    sequences = documents()
    write_pair(tmp_path / "corpus", sequences)
    expected = plain_loop(np.concatenate(sequences))
    config = tmp_path / "config.yaml"
    config.write_text(
        f"model: {{name: llama, {', '.join(f'{key}: {value}' for key, value in KEYS.items())}}}\n"
        f"data: {{source: megatron, path: {tmp_path}/corpus, validation: 0, seq_len: {SEQ}, "
        f"workers: 1}}\n"
        f"batch: {{global_size: {BATCH}, micro_size: 2}}\n"
        f"optimizer: {{lr: {LR}, warmup_steps: {WARMUP}, schedule: constant, clip_norm: {CLIP}}}\n"
        f"train: {{steps: {STEPS}, seed: {SEED}, output: {tmp_path}/run, sample_tokens: 0}}\n"
    )
    forked(processes, "-m", "meshtrain.train", str(config)).check()
    rows = read(tmp_path / "run/metrics.jsonl")
    assert len(rows) == STEPS
    for row, (loss, norm) in zip(rows, expected, strict=True):
        assert row["loss"] == pytest.approx(loss, rel=1e-5)
        assert row["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert expected[-1][0] < expected[0][0] - 0.05, (
        "a model that does not move would agree with anything"
    )
