"""Each config of the repository opens its kind of data, and its model takes a batch of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meshtrain.config import Config, spec_of
from meshtrain.data import open_data, train_batches
from meshtrain.modeling.build import objective_of, outputs, plain_model
from tests.data.files import write_images, write_lines, write_mnist, write_pair, write_tokens
from tests.parity.test_reference_loss import OF_EXAMPLES, experiment_of

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def text(folder: Path) -> Path:
    (folder / "a.txt").write_text("some text " * 300)
    return folder / "a.txt"


def jsonl(folder: Path) -> Path:
    return write_lines(
        folder / "a.jsonl",
        [{"prompt": f"{i} + {i} = ", "completion": str(2 * i)} for i in range(2000)],
    )


def mnist(folder: Path) -> Path:
    write_mnist(folder, 64, size=28)
    write_mnist(folder, 16, stem="t10k", size=28)
    return folder


MAKERS: dict[str, Callable[[Path], Any]] = {
    "text": text,
    "jsonl": jsonl,
    "tokens": lambda folder: write_tokens(folder / "tokens", *[range(1500)] * 4, vocab_size=32000),
    "megatron": lambda folder: write_pair(folder / "corpus", [list(range(1500))] * 4),
    "digits": lambda folder: pytest.importorskip("sklearn") and None,
    "mnist": mnist,
    "images": lambda folder: write_images(folder / "images", {"cat": 8, "dog": 8}),
}


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_a_config_opens_its_data_and_its_model_takes_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(CONFIGS.parent)
    path = CONFIGS / f"{name}.yaml"
    assert path.read_text().startswith("# ")  # when to use it
    overrides = [f"data.cache={tmp_path / 'cache'}"]
    if data := MAKERS.get(name, lambda folder: None)(tmp_path):
        overrides.append(f"data.path={data}")
    if name == "mnist":
        overrides.append(f"data.validation={data}")
    if name in ("tokens", "megatron"):  # a smaller model of the same kind
        overrides += [
            "model.hidden_size=96",
            "model.num_hidden_layers=1",
            "model.intermediate_size=64",
        ]
    if name in OF_EXAMPLES:  # weights of another run
        overrides += experiment_of(name, tmp_path).overrides
    config = Config.load(path, overrides, world_size=1, for_training=True)
    own_loss = spec_of(config).loss is not None
    opened = open_data(config.data, n_outputs=outputs(config), seed=0, say=print, own_loss=own_loss)
    assert opened.validation is not None
    keys = {
        "seed": 0,
        "first_step": 0,
        "steps": 1,
        "global_size": 2,
        "micro_size": 2,
        "rank": 0,
        "ranks": 1,
    }
    [[batch]] = train_batches(opened.train, **keys)
    with torch.no_grad():
        logits = plain_model(config).to_empty(device="cpu")(*batch.inputs)
    if own_loss:
        reference = None if config.train.reference is None else logits
        found = objective_of(config, opened.task).losses(logits, batch, reference=reference)
        assert found.samples.shape == (2,)
        return
    assert logits.shape == (*batch.targets.shape, outputs(config))
