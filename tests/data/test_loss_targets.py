"""Which share of the targets has a loss, as the banner, `prepare` and `plan` say it, and data of
which none has one."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshtrain.cli.main import main
from meshtrain.cli.plan import make_plan
from meshtrain.data import OpenData
from meshtrain.data.batch import LossTargets
from meshtrain.data.prepare import loss_share
from meshtrain.errors import InputError
from meshtrain.evaluate import require_training_targets
from meshtrain.objective import CrossEntropy
from meshtrain.run.setup import loss_lines
from meshtrain.run.step_logger import StepLogger
from tests.data.conftest import Opener
from tests.data.files import write_lines

LINE = {"prompt": "pppp", "completion": "cccccc"}  # and an end: of 11 tokens the last 7 have a loss


def of_lines(opened: Opener, folder: Path, *lines: dict[str, str], **keys: Any) -> OpenData:
    path = write_lines(folder / "x.jsonl", list(lines))
    return opened(source="jsonl", path=path, validation=0, seq_len=4, **keys)


def test_targets_are_those_of_whole_samples(opened: Opener, tmp_path: Path) -> None:
    data = of_lines(opened, tmp_path, LINE)
    assert data.train.loss_targets() == {"training": LossTargets(8, 5)}, (
        "and not the two of the last tokens"
    )
    assert list(loss_lines(data)) == ["training: 5 of 8 targets have a loss (62.5 %)"]
    require_training_targets(data.train, CrossEntropy(counts_correct=False))


def test_text_has_a_loss_everywhere_and_nothing_is_said(opened: Opener, tmp_path: Path) -> None:
    data = of_lines(opened, tmp_path, {"text": "0123456789"})
    assert data.train.loss_targets() == {"training": LossTargets(8, 8)}
    assert list(loss_lines(data)) == []


def test_answers_beyond_the_last_sample_are_none(opened: Opener, tmp_path: Path) -> None:
    data = of_lines(opened, tmp_path, {"prompt": 9 * "p", "completion": "c"})
    assert data.train.loss_targets() == {"training": LossTargets(8, 0)}
    with pytest.raises(InputError, match="data: training has no target with a loss"):
        require_training_targets(data.train, CrossEntropy(counts_correct=False))


def test_the_share_of_a_prepared_folder(opened: Opener, tmp_path: Path) -> None:
    of_lines(opened, tmp_path, LINE)
    of_lines(
        opened, tmp_path, {"text": "0123456789"}, text_field="text", cache=str(tmp_path / "plain")
    )
    (masked,), (plain,) = ((tmp_path / name).glob("x.jsonl-*") for name in ("cache", "plain"))
    assert loss_share(masked) == "7 of 11 tokens have a loss (63.6 %)"
    assert loss_share(plain) is None


def test_prepare_and_plan_say_the_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan says it of what lies prepared on its host, and needs no data."""
    path = write_lines(tmp_path / "x.jsonl", [LINE])
    keys = [
        f"data.path={path}",
        f"data.cache={tmp_path / 'cache'}",
        "data.tokenizer=bytes",
        "data.validation=0",
    ]
    share = "7 of 11 tokens have a loss (63.6 %)"
    config = ["configs/jsonl.yaml", "data.seq_len=4", *keys]
    assert not [note for note in make_plan(config[0], config[1:]).notes if "have a loss" in note]
    assert main(["prepare", *config]) == 0
    assert share in capsys.readouterr().out.splitlines()
    assert [note for note in make_plan(config[0], config[1:]).notes if note.endswith(share)]
    path.unlink()
    make_plan(config[0], config[1:])


@pytest.mark.parametrize(
    ("valid", "said"),
    [
        ([0] * 11 + [3], ["1-10"]),  # once, and not at each further step
        ([3] + [0] * 10 + [3] * 2, ["2-11"]),
        ([0, 0, 0], ["1-3"]),  # the whole of a short run
        ([0], ["1"]),
        ([3, 0, 0], []),
        ([0, 0, 3], []),
    ],
)
def test_steps_without_a_target_with_a_loss_are_said(valid: list[int], said: list[str]) -> None:
    lines: list[str] = []
    logger: Any = StepLogger.__new__(StepLogger)
    logger.steps, logger.tokens, logger._empty = len(valid), 0, 0
    logger.job, logger._metrics = SimpleNamespace(rank=0), SimpleNamespace(say=lines.append)
    for step, count in enumerate(valid, 1):
        logger._count_empty(SimpleNamespace(step=step, weight=count))
        logger.tokens += count
    assert [line.split(" had a loss")[0] for line in lines] == [
        f"no target of the steps {steps}" for steps in said
    ]
