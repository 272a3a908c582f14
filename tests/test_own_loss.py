"""Runs with a loss of one's own, in this process: what they log, which steps are empty, and what is
refused before an update."""

import json
import re
from pathlib import Path

import pytest
import torch

import meshtrain.run.results
from meshtrain.checkpoint.weights import load_weights
from meshtrain.config import Config
from meshtrain.config.errors import ConfigErrors
from meshtrain.data import open_data
from meshtrain.data.order import batch_samples
from meshtrain.errors import InputError
from meshtrain.evaluate import Evaluation, require_sum_over_tokens
from meshtrain.job.environment import Environment
from meshtrain.job.exit import job_exit
from meshtrain.job.locate import model_file
from meshtrain.job.process import join
from meshtrain.metrics.logger import read
from meshtrain.modeling.build import objective_of
from meshtrain.objective import OwnLoss
from meshtrain.train import run
from tests.comparing import CPU
from tests.launching import forked
from tests.parity.experiments import QUICKSTART, SMALL

EXAMPLES = Path(__file__).parents[1] / "tools" / "examples" / "losses"
REGRESSION = "configs/regression.yaml"
QUICK = ("train.steps=4", "train.eval_every=2", "train.eval_samples=9", "data.workers=0")


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meshtrain.run.results, "plot_loss", lambda *_: "no picture is drawn")


def train(config: str, folder: Path, *overrides: str) -> list[dict]:
    """Trains in a world of one, and reads the rows."""
    keys = [*overrides, f"train.output={folder}"]
    loaded = Config.load(config, keys, world_size=1, for_training=True)
    job = join(Environment("none", 0, 1, 0, "here", None))
    job.device = CPU
    with job_exit(job):
        run(loaded, job)
    return read(folder / "metrics.jsonl")


def regression(folder: Path, code: str) -> tuple[str, ...]:
    """The example with other functions, which `code` defines: overrides that name the file."""
    path = folder / "mine.py"
    path.write_text((EXAMPLES / "regression.py").read_text() + "\n\n" + code)
    return (f"model.name={path}", f"data.source={path}", *QUICK)


def test_a_step_is_what_torch_computes(tmp_path: Path) -> None:
    """The loss and the gradient by hand: one sum over the batch, divided by the sum of its
    weights."""
    code = "def weight(targets):\n    return 0.1 * targets[:, 1].square()\n"
    keys = (*regression(tmp_path, code), "train.precision=float64", "optimizer.lr=1e-30")
    row = train(REGRESSION, tmp_path / "run", *keys, "train.steps=1", "optimizer.min_lr=0")[0]

    example = model_file(str(tmp_path / "mine.py"))
    model = example.Model(example.Config()).double()
    load_weights(tmp_path / "run", model)
    data = example.dataset(None, "train")
    samples = [data[i] for i in batch_samples(0, 0, 32, len(data))]
    inputs, targets = (torch.stack(column) for column in zip(*samples, strict=True))
    sums, metrics = example.loss(model(inputs.double()), targets)
    loss = sums.sum() / example.weight(targets).double().sum()
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    absolute, counts = metrics["absolute_error"]
    assert row["loss"] == pytest.approx(loss.item(), rel=1e-12)
    assert row["grad_norm"] == pytest.approx(torch.nn.utils.get_total_norm(gradients).item(), 1e-12)
    assert row["absolute_error"] == pytest.approx((absolute.sum() / counts.sum()).item(), rel=1e-12)


def test_a_step_of_samples_that_count_nothing_is_no_update(tmp_path: Path) -> None:
    """One sample a step, of which only some count."""
    code = "def weight(targets):\n    return (targets[:, 0] > 0.5) * 0.5\n"
    keys = (
        *regression(tmp_path, code),
        "batch.global_size=1",
        "batch.micro_size=1",
        "train.steps=8",
        "checkpoint.every=1",
    )
    rows = train(REGRESSION, tmp_path / "run", *keys, "checkpoint.keep_last=9")
    empty = [row["step"] for row in rows if row["loss"] is None]
    assert 0 < len(empty) < 8

    folder = tmp_path / "run" / "checkpoints"
    bytes_of = {}
    for step in range(1, 9):
        parts = sorted((folder / f"step_{step:07}").glob("*.safetensors"))
        bytes_of[step] = [path.read_bytes() for path in parts]
    for step in range(2, 9):
        assert (bytes_of[step] == bytes_of[step - 1]) == (step in empty)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_in_16_bits(precision: str, tmp_path: Path) -> None:
    expected = train(REGRESSION, tmp_path / "32", *QUICK)
    rows = train(REGRESSION, tmp_path / "16", *QUICK, f"train.precision={precision}")
    for row, exact in zip(rows, expected, strict=True):
        assert row["loss"] == pytest.approx(exact["loss"], rel=0.03)
        assert row["absolute_error"] == pytest.approx(exact["absolute_error"], rel=0.03)


def test_it_goes_on_from_a_checkpoint_to_the_bit(tmp_path: Path) -> None:
    """With evaluations, the best of which is kept, and an epoch whose sums are carried over."""
    code = "def weight(targets):\n    return 0.1 + targets[:, 1].square()\n"
    keys = (
        *regression(tmp_path, code),
        "checkpoint.every=2",
        "checkpoint.keep_best=true",
        "train.eval_every=1",
        "optimizer.schedule=constant",
    )
    whole = train(REGRESSION, tmp_path / "whole", *keys)
    train(REGRESSION, tmp_path / "parts", *keys, "train.steps=2")
    parts = train(REGRESSION, tmp_path / "parts", *keys)
    for row, expected in zip(parts, whole, strict=True):
        for name in ("loss", "grad_norm", "absolute_error", "eval_loss", "eval_absolute_error"):
            assert row[name] == expected[name], (row["step"], name)
    manifests = [
        json.loads((tmp_path / name / "checkpoints/step_0000004/manifest.json").read_text())
        for name in ("whole", "parts")
    ]
    epochs = [manifest["books"]["epoch"] for manifest in manifests]
    assert epochs[0] == epochs[1]
    assert epochs[0]["weight"] != epochs[0]["targets"] == 4 * 32
    mean = epochs[0]["loss"] / epochs[0]["weight"]
    assert min(row["loss"] for row in whole) < mean < max(row["loss"] for row in whole)


def test_tokens_of_a_corpus_with_the_cross_entropy_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is what the built-in loss is: the curve, the evaluation, and the text at the end."""
    path = tmp_path / "mine.py"
    path.write_text(
        "from meshtrain.job.locate import model_file\n"
        "from meshtrain.loss import token_losses\n"
        "llama = model_file('llama')\n"
        "Config, Model, check, init_plan = llama.Config, llama.Model, llama.check, llama.init_plan\n"
        "def loss(outputs, targets):\n"
        "    return token_losses(outputs, targets).sum(1)\n"
    )
    keys = (
        *SMALL,
        f"data.cache={tmp_path / 'cache'}",
        *QUICK,
        "train.precision=float64",
        "train.sample_tokens=4",
    )
    built_in = train(QUICKSTART, tmp_path / "built_in", *keys)
    rows = train(QUICKSTART, tmp_path / "own", *keys, f"model.name={path}")
    for row, expected in zip(rows, built_in, strict=True):
        for name in ("loss", "grad_norm", "eval_loss", "perplexity", "bits_per_byte"):
            assert (name in row) == (name in expected)
            if name in row:
                assert row[name] == pytest.approx(expected[name], rel=1e-12)
        assert row["tokens"] == expected["tokens"]
    samples = re.findall(r"a sample, going on from .*\n.*", capsys.readouterr().out)
    assert len(samples) == 2
    assert samples[0] == samples[1]


def test_classes_have_an_accuracy_and_other_targets_none(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch.nn.functional as F\n"
        "from meshtrain.job.locate import model_file\n"
        "convnet = model_file('convnet')\n"
        "Config, Model, init_plan = convnet.Config, convnet.Model, convnet.init_plan\n"
        "def loss(outputs, targets):\n"
        "    return F.cross_entropy(outputs, targets, reduction='none')\n"
    )
    keys = ("train.epochs=null", *QUICK, "train.precision=float64")
    built_in = train("configs/digits.yaml", tmp_path / "built_in", *keys)
    rows = train("configs/digits.yaml", tmp_path / "own", *keys, f"model.name={path}")
    for row, expected in zip(rows, built_in, strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-12)
        assert row.get("accuracy") == expected.get("accuracy")
    assert "accuracy" in rows[-1]
    others = train(REGRESSION, tmp_path / "regression", *QUICK)
    assert not others[-1].keys() & {"accuracy", "perplexity", "bits_per_byte"}


def test_the_command_evaluates_with_the_same_loss(tmp_path: Path) -> None:
    rows = train(REGRESSION, tmp_path / "run", *QUICK, "train.precision=float64")
    evaluate = ("-m", "meshtrain.cli", "eval", tmp_path / "run", "--validation", "--json")
    named = ("--model", "tools/examples/losses/regression.py")
    for processes, layout in ((1, "{}"), (2, "{tp: 2}"), (2, "{dp_shard: 2}")):
        done = forked(processes, *evaluate, *named, "--layout", layout).check()
        numbers = json.loads(done.out)["validation"]
        assert numbers.keys() == {"eval_loss", "eval_absolute_error"}
        for name, value in numbers.items():
            assert value == pytest.approx(rows[-1][name], rel=1e-9)
    # A file that only the checkpoint names is not run.
    copied = tmp_path / "copied.py"
    copied.write_text((EXAMPLES / "regression.py").read_text())
    refused = forked(1, *evaluate, "--model", copied)
    assert refused.status == 2
    assert "--data FILE.py says which file may be" in refused.err


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("def loss(outputs, targets):\n    return 0.0\n", "is a float: expected a tensor (8,)"),
        (
            "def loss(outputs, targets):\n    return (outputs - targets).square()\n",
            "is a tensor (8, 2): expected a tensor (8,)",
        ),
        ("def weight(targets):\n    return targets[:, 1]\n", "of the data set"),
        ("def weight(targets):\n    return targets[:, 1] * 0\n", "is 0 for every sample"),
        (
            "def loss(outputs, targets):\n"
            "    one = outputs.new_ones(len(outputs))\n"
            "    return one, {'lr': (one, one)}\n",
            "a metric called 'lr'",
        ),
        ("loss = 3\n", "`loss` is a int"),
        ("def loss(outputs):\n    return outputs\n", "is called as `loss(outputs, targets)`"),
        ("del loss\n", "or a `loss(outputs, targets)` in the model's file"),
    ],
)
def test_what_is_refused_before_an_update(code: str, says: str, tmp_path: Path) -> None:
    with pytest.raises((InputError, SystemExit)) as raised:
        train(REGRESSION, tmp_path / "run", *regression(tmp_path, code))
    if isinstance(raised.value, InputError):
        assert says in str(raised.value)
    metrics = tmp_path / "run" / "metrics.jsonl"
    assert not metrics.exists() or not read(metrics)


@pytest.mark.parametrize("option", ["train.z_loss=1e-4", "train.label_smoothing=0.1"])
def test_options_of_the_built_in_loss_are_refused(option: str) -> None:
    with pytest.raises(ConfigErrors, match="has a loss of its own"):
        Config.load(REGRESSION, [option], world_size=1)


def test_a_loss_over_whole_samples_is_refused_with_cp(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    example = (EXAMPLES / "weighted_tokens.py").read_text()
    path.write_text(f"{example}\n\nover_whole_samples = True\n")
    keys = [f"model.name={path}", "layout={cp: 2}"]
    with pytest.raises(ConfigErrors, match="over_whole_samples = True"):
        Config.load("configs/weighted-tokens.yaml", keys, world_size=2)
    Config.load("configs/weighted-tokens.yaml", [keys[0], "layout={tp: 2}"], world_size=2)


@pytest.mark.parametrize(("name", "sums_tokens"), [("weighted-tokens", True), ("dpo", False)])
def test_only_a_sum_over_tokens_has_a_perplexity(name: str, sums_tokens: bool) -> None:
    config = Config.load(f"configs/{name}.yaml", [], world_size=1)
    assert objective_of(config, "language").sums_tokens == sums_tokens
    result = Evaluation(loss=1.0, targets=2, correct=None, sums_tokens=sums_tokens)
    assert ("perplexity" in result.numbers("language", None)) == sums_tokens


def test_the_weights_of_parts_of_a_sequence_add_up(tmp_path: Path) -> None:
    config = Config.load("configs/weighted-tokens.yaml", [], world_size=1)
    data = open_data(config.data, n_outputs=256, seed=0, say=print, own_loss=True)
    objective = objective_of(config, data.task)
    assert isinstance(objective, OwnLoss)
    require_sum_over_tokens(objective, data.train)
    whole = OwnLoss(objective.loss, lambda targets: torch.ones(len(targets["tokens"])))
    with pytest.raises(InputError, match=r"1 for the first sample and 2 for its two halves"):
        require_sum_over_tokens(whole, data.train)
