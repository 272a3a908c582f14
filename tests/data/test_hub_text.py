"""Data sets of the hub as text: the tokens are those of the same rows in a file, of one commit, and
`datasets` is asked for once."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from meshtrain.config import Config, ConfigErrors
from meshtrain.data import hub_text
from meshtrain.data.packing import TokenSamples
from meshtrain.errors import InputError
from meshtrain.job.hub import HubName
from tests.data.conftest import Opener
from tests.data.files import tokenizer_folder, write_lines
from tests.hub import Hub, offline, serving, use
from tests.launching import forked

ROWS = [{"text": f"document {n}, of {n} words", "id": n} for n in range(300)]
TALK = [
    {"role": "user", "content": "a b"},
    {"role": "assistant", "content": "b a", "train": True},
]
SHORT = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "a"}]


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving(Hub()) as hub:
        files = {"train.jsonl": lines(ROWS), "test.jsonl": lines(ROWS[:20])}
        hub.push("datasets/org/words", {**files, "README.md": "# words\n"})
        use(hub, tmp_path / "hf", monkeypatch)
        monkeypatch.chdir(tmp_path)
        yield hub
    hub_text._open.cache_clear()


def tokens_of(samples: Any) -> list[int]:
    assert isinstance(samples, TokenSamples)
    stream = samples.stream
    out = np.empty(len(stream), stream.corpus.tokens.dtype)
    stream.read(stream.corpus.tokens, 0, out)
    return out.tolist()


class Table:
    """Rows as `datasets` gives them."""

    def __init__(self, rows: list[dict[str, Any]], commit: str) -> None:
        self.rows = rows
        self.column_names = list(rows[0])
        self.data = SimpleNamespace(nbytes=100 * len(rows))
        self.cache_files = [{"filename": f"/cache/default/0.0.0/{commit}/train.arrow"}]
        self.commit = commit

    def __len__(self) -> int:
        return len(self.rows)

    def select_columns(self, names: list[str]) -> "Table":
        rows = [{name: row[name] for name in names} for row in self.rows]
        return Table(rows, self.commit)

    def __getitem__(self, part: slice) -> dict[str, list[Any]]:
        return {name: [row[name] for row in self.rows[part]] for name in self.column_names}


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The calls of `load_dataset` of a package in the place of `datasets`."""
    calls: list[dict[str, Any]] = []

    def load_dataset(repo: str, **options: Any) -> Table:
        calls.append({"repo": repo, **options})
        rows = ROWS[:20] if options["split"] == "test" else ROWS
        return Table(rows, options["revision"] if repo == "org/words" else "another")

    package = ModuleType("datasets")
    package.load_dataset = load_dataset  # type: ignore[attr-defined]
    package.disable_progress_bars = lambda: None  # type: ignore[attr-defined]
    package.config = SimpleNamespace(HF_DATASETS_CACHE="/nowhere")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", package)
    return calls


def test_rows_become_the_tokens_of_the_same_lines(
    hub: Hub,
    loads: list[dict[str, Any]],
    opened: Opener,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In several shards, merged in order; and prepared once, for each commit."""
    monkeypatch.setattr(hub_text, "LEAST_SHARD", 5000)
    file = write_lines(tmp_path / "x.jsonl", ROWS)
    keys: dict[str, Any] = {"source": "hub", "path": "org/words", "seq_len": 8}
    ours = opened(**keys)
    theirs = opened(source="jsonl", path=file, seq_len=8)
    assert tokens_of(ours.train) == tokens_of(theirs.train)
    assert tokens_of(ours.validation) == tokens_of(theirs.validation)
    assert ours.fingerprint == theirs.fingerprint
    (call,) = loads
    (commit,) = hub.repos["datasets/org/words"].commits
    assert (call["revision"], call["split"], call["name"]) == (commit, "train", None)

    assert opened(**keys).fingerprint == ours.fingerprint
    assert len(loads) == 1, "the tokens are there"
    split = opened(**{**keys, "validation": "test"})
    assert tokens_of(split.train) == tokens_of(opened(**{**keys, "validation": 0}).train)
    assert split.validation is not None
    assert split.validation.stream.documents == 20
    assert len(hub.fetched()) == 0


def test_another_commit_in_the_cache_is_not_taken(
    hub: Hub, loads: list[dict[str, Any]], opened: Opener
) -> None:
    """As `datasets` takes it if the hub does not answer."""
    hub.push("datasets/org/other", {"train.jsonl": lines(ROWS)})
    with pytest.raises(InputError, match=r"the cache of datasets has another version of org/other"):
        opened(source="hub", path="org/other", seq_len=8)


def test_columns_that_are_read(hub: Hub, loads: list[dict[str, Any]], opened: Opener) -> None:
    with pytest.raises(
        InputError, match=r"org/words@\w+ train: expected the column `body`, .*text, id"
    ):
        opened(source="hub", path="org/words", text_field="body", seq_len=8)
    with pytest.raises(InputError, match=r"row 1: `id` is 0, expected a string"):
        opened(source="hub", path="org/words", text_field="id", seq_len=8)


def test_a_data_set_in_a_config(hub: Hub, tmp_path: Path) -> None:
    def load(*overrides: str) -> Config:
        keys = ["data.source=hub", "data.path=org/words", *overrides]
        return Config.load("quickstart", keys, for_training=True)

    (commit,) = hub.repos["datasets/org/words"].commits
    assert load().data.path == f"org/words@{commit}"
    mixed = load("data.path=null", "data.sources=[{name: a, path: org/words, split: test}]")
    assert mixed.data.sources[0].path == f"org/words@{commit}"
    assert mixed.data.each_source()[0].split == "test"
    for overrides, says in (
        (["data.path=org/none"], r"data.path: .* has no dataset org/none"),
        (["data.source=jsonl", "data.path=.", "data.split=test"], "are of data sets on the hub"),
    ):
        with pytest.raises(ConfigErrors, match=says):
            load(*overrides)


# The package itself -------------------------------------------------------------------------------


@pytest.mark.integrations
def test_datasets_gives_the_same_tokens_online_and_offline(
    hub: Hub, opened: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = pytest.importorskip("datasets.config")
    file = write_lines(tmp_path / "x.jsonl", ROWS)
    keys: dict[str, Any] = {"source": "hub", "path": "org/words", "seq_len": 8}
    ours = opened(**keys)
    theirs = opened(source="jsonl", path=file, seq_len=8)
    assert tokens_of(ours.train) == tokens_of(theirs.train)

    hub_text._open.cache_clear()
    offline(monkeypatch)
    monkeypatch.setattr(config, "HF_HUB_OFFLINE", True)
    asked = len(hub.asked)
    again = opened(**keys, cache=str(tmp_path / "other"))
    assert again.fingerprint == ours.fingerprint
    assert len(hub.asked) == asked
    hub_text._open.cache_clear()
    with pytest.raises(InputError, match="the cache of datasets has another version"):
        hub_text._open(HubName("dataset", "org/words", "0" * 40), None, "train")


@pytest.mark.integrations
def test_conversations_have_the_ids_of_their_lines(
    hub: Hub, opened: Opener, tmp_path: Path
) -> None:
    """A table gives messages keys that only others have."""
    pytest.importorskip("datasets")
    rows = [{"messages": talk} for talk in (TALK, SHORT)]
    hub.push("datasets/org/talk", {"train.jsonl": lines(rows)})
    keys: dict[str, Any] = {
        "tokenizer": str(tokenizer_folder(tmp_path / "words")),
        "validation": 0,
        "seq_len": 4,
    }
    ours = opened(source="hub", path="org/talk", **keys)
    theirs = opened(source="jsonl", path=write_lines(tmp_path / "x.jsonl", rows), **keys)
    assert ours.fingerprint == theirs.fingerprint


@pytest.mark.integrations
@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (
            {"split": "tests"},
            r"org/words: Unknown split \"tests\". Should be one of \['train', 'test'\]",
        ),
        ({"subset": "en"}, r"org/words: BuilderConfig 'en' not found"),
        ({"path": "org/script"}, "org/script: Dataset scripts are no longer supported"),
        ({"path": "org/gated"}, "org/gated"),
        ({"path": "./words"}, "./words is a path here, and expected is the name of a data set"),
    ],
)
def test_what_datasets_refuses(keys: dict[str, Any], says: str, hub: Hub, opened: Opener) -> None:
    pytest.importorskip("datasets")
    hub.push("datasets/org/script", {"script.py": "raise SystemExit('ran')"})
    hub.push("datasets/org/gated", {"train.jsonl": lines(ROWS)}, gated=True)
    with pytest.raises(InputError, match=says):
        opened(**{"source": "hub", "path": "org/words", "seq_len": 8, **keys})


@pytest.mark.integrations
@pytest.mark.timeout(300)
def test_a_run_on_two_ranks_goes_on_with_its_commit(hub: Hub, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    write_lines(tmp_path / "x.jsonl", ROWS)
    model = "{name: llama, hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1, num_attention_heads: 2}"
    Path("mine.yaml").write_text(
        f"model: {model}\nbatch: {{global_size: 4, micro_size: 2}}\ntrain: {{steps: 2, sample_tokens: 0}}\n"
        "optimizer: {warmup_steps: 0}\ndata: {source: hub, path: org/words, seq_len: 16, workers: 0, cache: cache}\n"
    )

    def losses(run: str, *overrides: str) -> list[float]:
        options = [f"train.output={run}", "train.eval_every=0", *overrides]
        forked(2, "-m", "meshtrain.train", "mine.yaml", *options, cwd=tmp_path).check()
        rows = Path(run, "metrics.jsonl").read_text().splitlines()
        return [json.loads(row)["loss"] for row in rows]

    of_hub = losses("a")
    assert of_hub == losses("b", "data.source=jsonl", "data.path=x.jsonl")
    assert len([line for line in hub.asks() if line.endswith("/org/words")]) == 1
    hub.push("datasets/org/words", {"train.jsonl": lines(ROWS[::-1])})
    assert losses("a", "train.steps=3")[:2] == of_hub
    (commit, _) = hub.repos["datasets/org/words"].commits
    assert json.loads(Path("a/hub.json").read_text()) == {"datasets/org/words": commit}
