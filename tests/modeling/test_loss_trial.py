"""Whether a loss gathers samples is known before a run starts, where that can be known."""

from pathlib import Path

import pytest

from meshtrain.config import Config, spec_of
from meshtrain.data import OpenData, open_data
from meshtrain.errors import InputError
from meshtrain.layout import Layout
from meshtrain.modeling.build import outputs
from meshtrain.modeling.loss_trial import check_microbatches, gathers_samples
from meshtrain.parallel.gather_samples import NOT_ALL
from tests.test_own_loss import train

EXAMPLE = Path("tools/examples/losses/clip.py")
CLIP = "configs/clip.yaml"
QUICK = ("train.steps=2", "train.eval_every=0", "data.workers=0", "train.eval_samples=9")
READS_VALUES = """
def loss(outputs, targets, inner=loss):
    assert (outputs["image"] >= 0).any()  # meta tensors have no values
    return inner(outputs, targets)
"""
READS_IN_FORWARD = """
class Model(Model):
    def forward(self, images, captions):
        return super().forward(images, captions * int(captions.max() > -1))
"""
GATHERS_NOTHING = """
def loss(outputs, targets):
    return (outputs["image"] - outputs["caption"]).square().sum(1)
"""


def opened(config: Config) -> OpenData:
    return open_data(
        config.data,
        n_outputs=outputs(config),
        seed=0,
        say=print,
        own_loss=spec_of(config).loss is not None,
    )


def example_with(folder: Path, code: str) -> tuple[str, ...]:
    path = folder / "mine.py"
    path.write_text(EXAMPLE.read_text() + code)
    return (f"model.name={path}", f"data.source={path}")


@pytest.mark.parametrize(
    ("code", "gathers"),
    [("", True), (READS_VALUES, True), (GATHERS_NOTHING, False), (READS_IN_FORWARD, False)],
    ids=["on meta", "on zeros", "none", "not tried"],
)
def test_a_trial_tells(code: str, gathers: bool, tmp_path: Path) -> None:
    config = Config.load(CLIP, example_with(tmp_path, code), world_size=1)
    data = opened(config)
    assert gathers_samples(config, data.train, data.task) == gathers


def test_a_step_of_several_microbatches_is_refused_and_told_what_works() -> None:
    config = Config.load(CLIP, ["batch.micro_size=8"])
    data = opened(config)
    check_microbatches(config, Layout({"dp_shard": 4}), data.train, data.task)
    told = "a step of 32 is 2 microbatches: use batch.micro_size=11"
    with pytest.raises(InputError, match=told):
        check_microbatches(config, Layout({"dp_replicate": 3}), data.train, data.task)


def refused(capsys: pytest.CaptureFixture[str], folder: Path, *keys: str) -> str:
    """What a run says that ends with status 2."""
    with pytest.raises(SystemExit) as end:
        train(CLIP, folder, *QUICK, "batch.micro_size=8", *keys)
    assert end.value.code == 2
    return capsys.readouterr().err


def test_a_run_is_refused_before_its_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = "32 is 4 microbatches: use batch.micro_size=32"
    assert told in refused(capsys, tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_what_cannot_be_tried_is_refused_in_the_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = example_with(tmp_path, READS_IN_FORWARD)
    told = f"{NOT_ALL}, and a step of 32 is 4 microbatches: use batch.micro_size=32"
    assert told in refused(capsys, tmp_path / "run", *keys)
    assert not (tmp_path / "run" / "metrics.jsonl").read_text()


def test_a_loss_that_gathers_nothing_may_accumulate(tmp_path: Path) -> None:
    keys = (*example_with(tmp_path, GATHERS_NOTHING), *QUICK, "batch.micro_size=8")
    assert len(train(CLIP, tmp_path / "run", *keys)) == 2
