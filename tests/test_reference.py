"""Runs with a frozen reference: what they start from, what a checkpoint holds, and what is
refused."""

import json
import shutil
from pathlib import Path

import pytest

from meshtrain.checkpoint.weights import weights_digest
from meshtrain.config import Config, ConfigErrors
from tests.launching import forked
from tests.parity.test_reference_loss import SIZES, experiment_of
from tests.test_own_loss import QUICK, train

DPO = "configs/dpo.yaml"
KEYS = (*SIZES, *QUICK, "batch.global_size=8", "train.eval_every=4")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two folders of weights."""
    folder = tmp_path_factory.mktemp("weights")
    experiment_of("dpo", folder)
    first = folder / "reference of dpo"
    second = folder / "other"
    second.mkdir()
    data = bytearray((first / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (second / "model.safetensors").write_bytes(data)
    return first, second


def reference(folder: Path) -> str:
    return f"train.reference={{weights: {folder}}}"


def test_a_model_that_starts_as_its_reference_prefers_nothing(
    weights: tuple[Path, Path], tmp_path: Path
) -> None:
    """log 2 is the loss of a margin of 0; adapters begin with no effect, and the reference has
    none."""
    folder, _ = weights
    keys = (*KEYS, reference(folder), f"model.weights={folder}", "train.precision=float64")
    for number, tuning in enumerate(("train.lora=null", "train.lora={rank: 2}")):
        rows = train(DPO, tmp_path / str(number), *keys, tuning)
        assert rows[0]["loss"] == pytest.approx(0.6931471805599453, rel=1e-12)
        assert rows[0]["margin"] == pytest.approx(0, abs=1e-12)
        assert rows[-1]["margin"] != 0
        assert rows[-1]["eval_margin"] != 0


def test_a_checkpoint_holds_no_reference_and_goes_on_with_the_same_one_only(
    weights: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, other = weights
    keys = (*KEYS, "train.sample_tokens=0", "checkpoint.every=2")
    whole = train(DPO, tmp_path / "whole", *keys, reference(folder))
    checkpoint = tmp_path / "whole" / "checkpoints" / "step_0000002"
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    assert not any("reference" in name for name in manifest["tensors"])
    assert manifest["versions"]["the weights of train.reference"] == weights_digest(folder)

    keys = (*keys, f"checkpoint.resume={checkpoint}")
    with pytest.raises(SystemExit):
        train(DPO, tmp_path / "other", *keys, reference(other))
    assert "the weights of train.reference: " in capsys.readouterr().err

    # The same weights at another place.
    moved = tmp_path / "moved"
    shutil.copytree(folder, moved)
    rows = train(DPO, tmp_path / "moved_on", *keys, reference(moved))
    assert [(row["step"], row["loss"], row["margin"]) for row in rows] == [
        (row["step"], row["loss"], row["margin"]) for row in whole[2:]
    ]


@pytest.mark.parametrize("name", ["dpo", "clip"])
def test_the_command_evaluates_as_the_run_does(
    name: str, weights: tuple[Path, Path], tmp_path: Path
) -> None:
    """With the reference, and with as many samples together as in a step, on any layout."""
    keys = (*QUICK, "train.precision=float64", "train.eval_every=4", "train.eval_samples=40")
    if name == "dpo":
        keys = (*SIZES, *keys, reference(weights[0]))
    rows = train(f"configs/{name}.yaml", tmp_path / "run", *keys)
    evaluate = ("-m", "meshtrain.cli", "eval", tmp_path / "run", "--validation", "--json")
    own = f"tools/examples/losses/{name}.py"
    for processes, layout in ((1, "{}"), (2, "{pp: 2}"), (3, "{dp_shard: 3}")):
        named = ("--model", own, "--data", own, "--layout", layout)
        done = forked(processes, *evaluate, *named).check()
        numbers = json.loads(done.out)["validation"]
        metrics = {"dpo": {"eval_margin", "eval_preferred"}, "clip": {"eval_own_caption"}}[name]
        assert numbers.keys() >= {"eval_loss"} | metrics
        for metric, value in numbers.items():
            assert value == pytest.approx(rows[-1][metric], rel=1e-9)


TWO = "def loss(outputs, targets):\n    return outputs.sum((1, 2))\n"
EITHER = "def loss(outputs, targets, reference=None):\n    return outputs.sum((1, 2))\n"
NONE = "del loss, weight, over_whole_samples\n"


@pytest.mark.parametrize(
    ("code", "with_reference", "told"),
    [
        ("", True, None),
        (
            "",
            False,
            r"`loss` .* takes three arguments, .* give train\.reference: \{weights: FOLDER\}",
        ),
        (TWO, False, None),
        (TWO, True, r"called as `loss\(outputs, targets, reference\)` then, and takes two"),
        (EITHER, True, None),
        (EITHER, False, None),
        (NONE, True, r"nothing looks at a reference: define `loss\(outputs, targets, reference\)`"),
        (NONE, False, None),
        ("def loss(outputs):\n    return outputs\n", True, r"`loss\(outputs\)` is called as"),
    ],
)
def test_a_loss_takes_a_reference_or_none(
    code: str, with_reference: bool, told: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(Path("tools/examples/losses/dpo.py").read_text() + "\n\n" + code)
    keys = (
        *KEYS,
        f"model.name={path}",
        reference(tmp_path) if with_reference else "train.reference=null",
    )
    if told is None:
        Config.load(DPO, keys, world_size=1)
        return
    with pytest.raises(ConfigErrors, match=told):
        Config.load(DPO, keys, world_size=1)


def test_weights_that_are_not_there_are_said(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigErrors, match=r"train\.reference\.weights: .*neither model\.safetensors"
    ):
        Config.load(DPO, (*KEYS, reference(tmp_path)), world_size=1, for_training=True)


def test_pairs_have_no_loss_in_parts(tmp_path: Path) -> None:
    with pytest.raises(ConfigErrors, match="its loss is no sum over tokens"):
        Config.load(DPO, (*KEYS, reference(tmp_path), "layout={cp: 2}"), world_size=2)
