"""The command as users start it: what is printed, with which exit status, and what stays behind."""

import itertools
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from meshtrain.data.order import batch_samples, share
from meshtrain.metrics.logger import read
from tests.launching import ROOT, forked, root_cause, run, torchrun, two_hosts
from tests.parity.experiments import QUICKSTART, SMALL

MAIN = ("-m", "meshtrain.train")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The quickstart in the small, with its data prepared once for this module."""
    cache = tmp_path_factory.mktemp("cache")
    return (QUICKSTART, *SMALL, f"data.cache={cache}", "train.steps=3")


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    text = (ROOT / QUICKSTART).read_text().replace("hidden_size", "hiden_size")
    path = tmp_path / "broken.yaml"
    path.write_text(text.replace("micro_size: 4", "micro_size: no"))
    return path


def check_input_errors(printed: str) -> None:
    assert "2 errors" in printed
    assert printed.count("hiden_size") == 1, printed
    assert printed.count("did you mean hidden_size") == 1
    assert printed.count("batch.micro_size") == 1
    assert printed.count("Traceback") <= printed.count("ChildFailedError: "), (
        "no traceback but torchrun's own"
    )


def test_wrong_input_ends_a_world_of_one_with_status_2(broken: Path, tmp_path: Path) -> None:
    done = run([sys.executable, *MAIN, str(broken), f"train.output={tmp_path / 'run'}"])
    assert done.status == 2
    assert done.out == ""
    check_input_errors(done.err)
    assert not (tmp_path / "run").exists(), "a run that is refused leaves nothing"


def test_under_torchrun_wrong_input_is_printed_once_and_whole(broken: Path) -> None:
    """By one rank, and not again by those that torchrun starts again."""
    done = torchrun(2, "--max-restarts=1", *MAIN, str(broken))
    assert done.status == 1, "torchrun turns every status into 1"
    check_input_errors(done.err)
    assert "exitcode  : 2" in done.err
    assert root_cause(done.err).endswith("errors (the rest is printed above)")
    assert "To enable traceback" not in done.err
    assert "SIGTERM)" not in done.err


@pytest.mark.slow
def test_under_two_agents_wrong_input_is_printed_by_rank_0(broken: Path) -> None:
    done = two_hosts((1, 1), *MAIN, str(broken))
    check_input_errors("".join(agent.err for agent in done))


def test_prompts_that_are_longer_than_a_batch(tmp_path: Path) -> None:
    """A step without a target has no loss, which is no 0; held-out samples without any are refused
    before the first."""
    path, held_out, output = tmp_path / "long.jsonl", tmp_path / "held.jsonl", tmp_path / "run"
    path.write_text(5 * (json.dumps({"prompt": 240 * "p", "completion": 24 * "c"}) + "\n"))
    held_out.write_text(json.dumps({"prompt": 40 * "p", "completion": "c"}) + "\n")
    small = [
        QUICKSTART,
        *SMALL,
        f"data.cache={tmp_path}",
        "data.source=jsonl",
        f"data.path={path}",
        "data.seq_len=16",
    ]
    small += ["batch={global_size: 1, micro_size: 1}", "train.steps=6", f"train.output={output}"]
    refused = forked(1, *MAIN, *small, f"data.validation={held_out}", "train.eval_every=5")
    assert refused.status == 2
    assert "the validation data has no target with a loss" in refused.err
    keys = ["data.validation=0", "checkpoint={every: 1, keep_last: 9, in_background: false}"]
    done = forked(1, *MAIN, *small, *keys).check()
    assert "training: 113 of 1,312 targets have a loss (8.61 %)" in done.out
    rows = read(output / "metrics.jsonl")
    states = [
        load_file(output / f"checkpoints/step_{row['step']:07d}/rank_00000.safetensors")
        for row in rows
    ]
    for (before, after), row in zip(itertools.pairwise(states), rows[1:], strict=True):
        changed = any(
            not torch.equal(before[name], after[name])
            for name in before
            if name.startswith("model.")
        )
        moved = any(
            not torch.equal(before[name], after[name])
            for name in before
            if name.startswith("optimizer.")
        )
        assert (changed, moved) == (row["loss"] is not None,) * 2, (
            f"step {row['step']}: an empty step is no update"
        )
    assert None in [row["loss"] for row in rows]
    tokens = [0, *(row["tokens"] for row in rows)]
    assert [row["loss"] is None for row in rows] == [
        before == after for before, after in itertools.pairwise(tokens)
    ]


def test_data_without_a_target_with_a_loss_is_refused(tmp_path: Path) -> None:
    """Such a run would end well, and have learned nothing."""
    path = tmp_path / "prompts.jsonl"
    # whose answer is in no whole sample
    path.write_text(json.dumps({"prompt": 245 * "p", "completion": "c"}))
    small = [
        QUICKSTART,
        *SMALL,
        f"data.cache={tmp_path}",
        "data.source=jsonl",
        "data.seq_len=16",
        "data.validation=0",
    ]
    small += [f"train.output={tmp_path / 'run'}"]
    refused = forked(2, *MAIN, *small, f"data.path={path}")
    assert refused.status == 2
    assert (
        "data: training has no target with a loss, so that nothing would be learned" in refused.err
    )
    good = tmp_path / "good.jsonl"
    good.write_text(json.dumps({"text": 400 * "a"}))
    sources = f"[{{name: good, path: {good}}}, {{name: prompts, path: {path}}}]"
    refused = forked(1, *MAIN, *small, f"data.sources={sources}")
    assert refused.status == 2
    assert "data: prompts has no target with a loss" in refused.err


def test_a_log_that_lacks_characters_ends_no_run(tmp_path: Path) -> None:
    """Of a folder's name at the start, and of the model's text at the end, before the export."""
    text, output = tmp_path / "лиса.txt", tmp_path / "лиса"
    text.write_text("лиса и собака " * 40)
    overrides = [
        f"train.output={output}",
        f"train.export={tmp_path / 'export'}",
        f"data.path={text}",
    ]
    overrides += ["data.source=text", f"data.cache={tmp_path}", "data.seq_len=16"]
    overrides += ["train.steps=1", "train.sample_tokens=4"]
    done = run(
        [sys.executable, *MAIN, QUICKSTART, *SMALL, *overrides], env={"PYTHONIOENCODING": "latin-1"}
    ).check()
    assert f"checkpoints every 100 steps in {tmp_path}/????" in done.out
    assert (tmp_path / "export" / "model.safetensors").is_file()


def test_wrong_commands_and_launchers_are_input_errors() -> None:
    wrong = [
        (forked(1, *MAIN), "usage: "),
        (forked(1, *MAIN, "configs/quickstrat.yaml"), "configs/quickstart.yaml"),
        (
            run([sys.executable, *MAIN, QUICKSTART], env={"LOCAL_RANK": "0", "WORLD_SIZE": "2"}),
            "RANK",
        ),
    ]
    for done, printed in wrong:
        assert done.status == 2
        assert printed in done.err


def test_a_run_and_its_folder(small: tuple[str, ...], tmp_path: Path) -> None:
    """A run on 2 + 1 processes under two agents; then the same again, by one process."""
    output = tmp_path / "run"
    first, second = two_hosts(
        (2, 1),
        *MAIN,
        *small,
        f"train.output={output}",
        "train.eval_every=3",
        "train.sample_tokens=5",
    )
    printed = first.check().out + second.check().out
    host = printed.split("3 processes = ")[1].split(",")[0]
    assert host.startswith("1 host x 3"), "both agents run on this machine"
    assert (
        "global batch 14 over 3 data ranks: 4 or 5 samples a rank, 3 accumulation of 2" in printed
    )
    assert "layout {dp_shard: 3}" in printed
    assert "eval at step 3: loss" in printed
    assert "a sample, going on from" in printed
    rows = read(output / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert "eval_loss" in rows[2]
    assert {"bits_per_byte", "perplexity", "mfu", "memory_gib", "time_communication_s"} <= rows[
        2
    ].keys()
    # a token's; attention's come on top
    products = 6 * (2 * (2 * 48 * 48 + 2 * 48 * 24 + 3 * 48 * 112) + 48 * 256)
    causal = (products + 6 * 2 * 48 * 49) / (products + 12 * 2 * 48 * 48)
    assert [row["mfu_causal"] / row["mfu"] for row in rows] == pytest.approx(
        [causal] * 3, rel=1e-12
    )
    assert f"(causal {100 * rows[2]['mfu_causal']:.1f} %)" in printed
    exit_file = json.loads((output / "exit.json").read_text())
    assert exit_file.pop("goodput")["jobs"] == 1
    assert exit_file == {
        "status": "done",
        "kind": "done",
        "code": 0,
        "reason": "all steps are done",
        "step": 3,
        "hosts": [],
    }
    assert (output / "loss.png").stat().st_size > 10_000
    assert "rank" in (output / "layout.txt").read_text()

    def files() -> dict[str, bytes]:
        paths = (
            path
            for path in output.iterdir()
            if path.is_file() and path.name not in (".lock", ".owner")
        )
        return {path.name: path.read_bytes() for path in paths}

    before = files()
    again = forked(
        1, *MAIN, str(output / "config.yaml"), f"train.export={tmp_path / 'out'}"
    ).check()
    assert f"meshtrain export {output} {tmp_path / 'out'}" in again.out
    assert "To go further" in again.out
    assert before == files()


OWN_MODEL = """
from dataclasses import dataclass
import torch
from torch import nn

@dataclass(frozen=True)
class Config:
    vocab_size: int = 256
    width: int = 16
    fail_on_rank: int = -1
    bad_data_on_rank: int = -1
    nan_on_token: int = -1

class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.register_buffer("scale", torch.tensor(0.5))
        self.head = nn.Linear(config.width, config.vocab_size)

    def forward(self, tokens, positions, documents):
        import os
        if int(os.environ.get("RANK", "0")) == self.config.fail_on_rank:
            raise ValueError("a bug in the model")
        if int(os.environ.get("RANK", "0")) == self.config.bad_data_on_rank:
            from meshtrain.errors import InputError
            raise InputError("sample 3 cannot be read")
        y = self.head(torch.tanh(self.embed(tokens)) * self.scale)
        if self.config.nan_on_token >= 0:
            bad = (tokens == self.config.nan_on_token).any(1)
            y = y + torch.where(bad, float("nan"), 0.0)[:, None, None]
        return y
"""


@pytest.fixture
def own(tmp_path: Path) -> tuple[str, ...]:
    """A config that names a user's own model, over a text of his own."""
    (tmp_path / "own_model.py").write_text(OWN_MODEL)
    (tmp_path / "text.txt").write_text(
        "".join(chr(97 + i % 23) for i in range(4000)) + "Z" + "ab" * 2000
    )
    (tmp_path / "own.yaml").write_text(
        f"model: {{name: {tmp_path}/own_model.py}}\n"
        f"data: {{source: text, path: {tmp_path}/text.txt, cache: {tmp_path}/cache, validation: 0, "
        f"seq_len: 32}}\n"
        "batch: {global_size: 12, micro_size: 2}\n"
        "optimizer: {lr: 1e-2, warmup_steps: 1}\n"
        f"train: {{steps: 25, eval_every: 0, sample_tokens: 4, output: {tmp_path}/run}}\n"
    )
    return (str(tmp_path / "own.yaml"),)


def test_a_failing_rank_is_named(own: tuple[str, ...], tmp_path: Path) -> None:
    done = torchrun(2, *MAIN, *own, "model.fail_on_rank=1", "layout={dp_replicate: 2}")
    assert done.status == 1
    assert "ValueError: a bug in the model" in done.err
    assert "This was rank 1 on host" in done.err
    assert "(dp_replicate 1)" in done.err
    summary = done.err.split("Root Cause (first observed failure)")[1]
    assert "rank      : 1" in summary
    assert "a bug in the model" in summary, "torchrun's summary has the reason"
    assert json.loads((tmp_path / "run/exit.json").read_text())["status"] == "failed"


def test_wrong_input_that_one_rank_finds_in_the_middle_ends_all(
    own: tuple[str, ...], tmp_path: Path
) -> None:
    done = forked(3, *MAIN, *own, "model.bad_data_on_rank=1", timeout=100)
    assert done.status == 2
    assert re.search(
        r"^rank 1 on host \S+ \(dp_shard 1\): sample 3 cannot be read$", done.err, re.MULTILINE
    ), done.err
    ended = json.loads((tmp_path / "run/exit.json").read_text())
    assert ended["status"] == "failed"
    assert "sample 3 cannot be read" in ended["reason"], (
        "the culprit's story, not that of a rank that lost it"
    )


@pytest.mark.parametrize("layout", ["{dp_replicate: 3}", "{dp_shard: 3}"])
def test_a_loss_that_is_not_finite_stops_all_ranks_before_the_update(
    own: tuple[str, ...], tmp_path: Path, layout: str
) -> None:
    """The one sample with a Z in it gives NaN. All ranks stop, and the rank and the sample are
    named."""
    done = forked(3, *MAIN, *own, f"model.nan_on_token={ord('Z')}", f"layout={layout}")
    assert done.status == 1
    rows = read(tmp_path / "run/metrics.jsonl")
    sample = 4000 // 32
    n_samples = 8001 // 32
    step = next(s for s in range(25) if sample in batch_samples(0, s, 12, n_samples))
    rank = next(
        r
        for r in range(3)
        if sample in [batch_samples(0, step, 12, n_samples)[i] for i in share(12, 3, r)]
    )
    assert [row["step"] for row in rows] == list(range(1, step + 1)), (
        "the row of the bad step is not written"
    )
    assert f"step {step + 1}: the loss is not finite (rank {rank} on host" in done.err
    assert f"samples {sample}" in done.err
    assert f"the parameters are those of step {step}" in done.err
    ended = json.loads((tmp_path / "run/exit.json").read_text())
    assert (ended["status"], ended["step"]) == ("failed", step)


def test_a_step_that_is_not_finite_can_be_skipped(own: tuple[str, ...], tmp_path: Path) -> None:
    done = forked(
        2, *MAIN, *own, f"model.nan_on_token={ord('Z')}", "train.on_nonfinite=skip"
    ).check()
    assert "its update is left out" in done.out
    rows = read(tmp_path / "run/metrics.jsonl")
    assert len(rows) == 25
    bad = next(row["step"] for row in rows if row["loss"] is None)
    assert [row for row in rows if row["step"] > bad and row["loss"] is not None], (
        "the run goes on with finite losses"
    )


@pytest.mark.parametrize(
    "layouts",
    [
        [(3, "dp_shard=3"), (4, "dp_shard=2,tp=2")],
        pytest.param(
            [(2, "dp_replicate=2"), (4, "dp_replicate=2,dp_shard=2")], marks=pytest.mark.slow
        ),
    ],
    ids=["sharded", "replicated"],
)
def test_own_loop_is_the_same_under_every_layout(layouts: list[tuple[int, str]]) -> None:
    script = str(ROOT / "tools/examples/own_loop.py")
    alone = forked(1, script).check().out
    loss = alone.split(": ", 2)[2]
    for processes, layout in layouts:
        printed = forked(processes, script, layout).check().out
        assert printed.split(": ", layout.count("=") + 1)[-1] == loss, printed
