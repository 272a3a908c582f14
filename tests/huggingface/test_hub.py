"""Names on the hub in the place of folders: what is fetched, when, by whom, and how a name that
leads nowhere is refused. The hub is a server of the test's own (tests/hub.py)."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshtrain.checkpoint.weights import open_weights
from meshtrain.config import Config, ConfigErrors
from meshtrain.data.tokenizer import open_tokenizer
from meshtrain.huggingface.load import fetch_weights
from meshtrain.huggingface.safetensors import INDEX, SINGLE
from meshtrain.job.hub import HubName, ask, hub_name
from tests.data.files import tokenizer_folder
from tests.hub import Hub, offline, serving, use
from tests.huggingface.models import REST, run_config, transformers_model
from tests.launching import forked

NEVER = {
    "pytorch_model.bin": b"\x80pickle",
    "modeling_evil.py": "raise SystemExit('ran')",
    "original/consolidated.safetensors": b"",
    "README.md": "# a model",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in several files."""
    path = tmp_path_factory.mktemp("model")
    transformers_model("plain").save_pretrained(path, max_shard_size="40KB")
    return path


@pytest.fixture
def hub(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving(Hub()) as hub:
        hub.push_folder("org/tiny", folder, NEVER)
        use(hub, tmp_path / "hf", monkeypatch)
        monkeypatch.chdir(tmp_path)
        yield hub


def load(weights: str, *overrides: str, for_training: bool = True) -> Config:
    Path("mine.yaml").write_text(f"model: {{name: llama, weights: {weights}}}{REST}")
    return Config.load("mine.yaml", overrides, for_training=for_training)


@pytest.mark.parametrize(
    ("text", "revision"),
    [
        ("org/name", None),
        ("meta-llama/Llama-3.2-1B@main", "main"),
        ("org/name@refs/pr/1", "refs/pr/1"),
    ],
)
def test_a_name_of_the_hub(text: str, revision: str | None) -> None:
    name = hub_name(text)
    assert name is not None
    assert (str(name), name.revision) == (text, revision)
    assert HubName.parsed(f"datasets/{text}") == hub_name(text, "dataset")


@pytest.mark.parametrize(
    "text",
    [
        "name",
        "/org/name",
        "./org",
        "../name",
        "~/name",
        "a/b/c",
        "org/..",
        "org/name/",
        "org--a/b",
        "s3://bucket/a",
        "org/tokenizer.json",
        "org/model.safetensors",
        "org/name@",
        "here/new",  # a folder `here` is there
        "here/folder",
        "runs/first",
    ],
)
def test_a_path(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here" / "folder").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub_name(text) is None


def test_only_what_is_needed_is_fetched_and_only_once(hub: Hub, folder: Path) -> None:
    """First the texts by which a config is checked; tensors once the run begins."""
    config = load("org/tiny")
    commit = hub.push("org/tiny", {"config.json": "{}"})  # the branch moves
    assert commit not in str(config.model.weights)
    assert config.model.keys == run_config(folder).model.keys
    assert set(hub.fetched()) == {"config.json", "generation_config.json", INDEX}

    fetch_weights(str(config.model.weights), print)
    fetch_weights(str(config.model.weights), print)
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(shards) > 1
    assert sorted(hub.fetched()[3:]) == shards
    assert len(hub.asks()) == 1
    with open_weights(str(config.model.weights)) as fetched, open_weights(folder) as there:
        assert fetched.entries == there.entries


def test_a_folder_of_that_name_comes_first(hub: Hub, folder: Path) -> None:
    shutil.copytree(folder, "org/tiny")
    assert load("org/tiny").model.weights == "org/tiny"
    assert hub.asked == []


def test_a_revision(hub: Hub) -> None:
    old = next(iter(hub.repos["org/tiny"].commits))
    hub.push("org/tiny", {"config.json": "{}"})
    assert load(f"org/tiny@{old}").model.weights == f"org/tiny@{old}"


def test_without_a_network_the_cache_counts(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    online = load("org/tiny")
    asked = len(hub.asked)
    offline(monkeypatch)
    assert load("org/tiny") == online
    assert len(hub.asked) == asked

    use(hub, Path("hf").absolute(), monkeypatch)
    hub.is_down = True
    assert load("org/tiny") == online
    assert "answers with status 503" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ("org/none", "has no model org/none that this user may see: mend the name"),
        ("org/tiny@v9", "has no revision v9 of org/tiny: name a branch"),
        ("org/gated", "org/gated@[0-9a-f]{40} is gated: ask for access at http.*export HF_TOKEN"),
        ("org/pickled", "holds its weights as pytorch_model.bin, a pickle"),
        ("org/empty", "there is no .*config.json"),
        ("my/first", "there is no my/first on this disk, and http.* has no model my/first"),
        ("runs/first", "there is no runs/first/config.json"),
        ("./org/none", "there is no .*config.json: .*; a Hugging Face directory has"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused_with_its_place(
    weights: str, says: str, hub: Hub, folder: Path
) -> None:
    hub.push("org/gated", {"config.json": "{}"}, gated=True)
    hub.push("org/empty", {"model.safetensors": b""})
    config = (folder / "config.json").read_text()
    hub.push("org/pickled", {"config.json": config, "pytorch_model.bin": b""})
    with pytest.raises(ConfigErrors, match=rf"mine.yaml:1: model.weights: (?s:.*){says}"):
        load(weights)
    assert set(hub.fetched()) <= {"config.json"}


def test_no_network_and_an_empty_cache(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.is_down = True
    with pytest.raises(ConfigErrors, match=r"status 503 .*HF_ENDPOINT.*hf download org/tiny"):
        load("org/tiny")
    offline(monkeypatch)
    with pytest.raises(
        ConfigErrors, match=r"HF_HUB_OFFLINE.*\(hf download org/tiny --revision a\)"
    ):
        load("org/tiny@a")


def test_a_missing_package_is_named_with_its_extra(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    ask.cache_clear()
    with pytest.raises(ConfigErrors, match=r"pip install 'meshtrain\[hub\]'"):
        load("org/tiny")


def test_the_class_and_sizes_of_transformers_by_a_name(hub: Hub, folder: Path) -> None:
    Path("mine.yaml").write_text(f"model: {{name: transformers, path: org/tiny}}{REST}")
    config = Config.load("mine.yaml")
    Path("mine.yaml").write_text(f"model: {{name: transformers, path: {folder}}}{REST}")
    assert config.model == Config.load("mine.yaml").model
    assert not any(name.startswith("model-0") for name in hub.fetched())


def test_a_tokenizer_by_a_name(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other commands than training take it as it is written."""
    file = tokenizer_folder(tmp_path / "words")
    commit = hub.push_folder("org/words", file.parent)
    there = open_tokenizer(str(file))
    for name in ("org/words", f"org/words@{commit}"):
        fetched = open_tokenizer(name)
        assert fetched.identity == there.identity
        assert fetched.chat is not None
    config = load("org/tiny", "data.tokenizer=org/words", for_training=True)
    assert config.data.tokenizer == f"org/words@{commit}"
    again = load("org/tiny", "data.tokenizer=org/words", for_training=False)
    assert again.data.tokenizer == "org/words"
    with pytest.raises(ConfigErrors, match=r"data.tokenizer: org/tiny@.* has no tokenizer.json"):
        load("org/tiny", "data.tokenizer=org/tiny")


def rows(run: str) -> list[Any]:
    text = Path(run, "metrics.jsonl").read_text()
    return [json.loads(line)["loss"] for line in text.splitlines()]


@pytest.mark.timeout(300)
def test_a_run_on_two_ranks_fetches_once_and_goes_on_with_the_same_commit(
    hub: Hub, folder: Path, tmp_path: Path
) -> None:
    """The branch moves, and the files of the weights are gone from the cache, when it goes on."""
    (commit,) = hub.repos["org/tiny"].commits

    def train(run: str, weights: str | Path, *overrides: str) -> None:
        Path("mine.yaml").write_text(f"model: {{name: llama, weights: {weights}}}{REST}")
        short = ["train.sample_tokens=0", "data.validation=0", "optimizer.warmup_steps=0"]
        options = [*short, "layout={dp_shard: 2}", f"train.output={run}", *overrides]
        arguments = ["-m", "meshtrain.train", "mine.yaml", *options]
        forked(2, *arguments, cwd=tmp_path).check()

    train("named", "org/tiny")
    train("folder", folder)
    assert rows("named") == rows("folder")
    assert len(hub.asks()) == 1
    assert len(hub.fetched()) == len(set(hub.fetched()))
    assert not set(hub.fetched()) & {name.rpartition("/")[2] for name in NEVER}
    config = yaml.safe_load(Path("named/config.yaml").read_text())
    assert config["model"]["weights"] == f"org/tiny@{commit}"
    assert json.loads(Path("named/hub.json").read_text()) == {"org/tiny": commit}

    hub.push("org/tiny", {"config.json": "{}"})
    shutil.rmtree("hf")
    fetched = len(hub.fetched())
    train("named", "org/tiny", "train.steps=3")
    assert len(rows("named")) == 3
    assert not any(name.endswith(".safetensors") for name in hub.fetched()[fetched:])
    assert hub.asks()[1:] == [f"GET /api/models/org/tiny/revision/{commit}"]
    assert SINGLE not in hub.fetched()
