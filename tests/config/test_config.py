"""Reading a config: what is refused and how, overrides, numbers, the resolved config, the published
schema."""

import json
import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from meshtrain.config import NAMES, Config, ConfigErrors
from meshtrain.config import docs as config_docs
from meshtrain.config.errors import ConfigError, Place
from meshtrain.config.keys import seconds
from meshtrain.config.removed import REMOVED, without_removed
from meshtrain.config.schema import OptimizerName
from meshtrain.config.yaml_reader import Node, read_scalar, read_text, write
from meshtrain.errors import InputError
from meshtrain.job import locate
from meshtrain.job.consistency import run_fingerprints
from meshtrain.optim.registry import OPTIMIZERS
from tests.launching import ROOT
from tests.properties import evaluated, given, settings, st

HERE = Path(__file__).parent
BROKEN, ACCEPTED, FILES = (
    yaml.safe_load((HERE / f"{name}.yaml").read_text())
    for name in ("broken", "accepted", "model_files")
)
NEEDED = {
    "model": "{name: MODEL, width: 8}",
    "batch": "{global_size: 8, micro_size: 2}",
    "train": "{steps: 100}",
}
SCHEDULE = "0F0,0F1,,,0B0,0B1\n,1F0,1B0,1F1,1B1\n"  # of 2 ranks and 2 microbatches


def plus(more: str = "", **sections: str) -> str:
    """A config of the three lines that each needs, with other texts for some, and of more."""
    return "".join(f"{name}: {text}\n" for name, text in (NEEDED | sections).items()) + f"{more}\n"


def text_of(row: Mapping[str, Any]) -> str:
    """The text of a row of the tables."""
    if "text" in row:
        return row["text"]
    return plus(row.get("more", ""), **{name: row[name] for name in NEEDED if name in row})


@pytest.fixture(scope="module")
def fill(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Replaces the capital words of the tables; the plain model is in a folder, beside files that
    are no models."""
    model = tmp_path_factory.mktemp("model") / "plain.py"
    model.write_text(FILES["plain"])
    with_layer = FILES["plain"] + FILES["one_layer"]
    others = FILES["broken"] | {name: with_layer + plan for name, plan in FILES["plans"].items()}
    for name, text in others.items():
        Path(f"{model}.{name}.py").write_text(text)
    words = {
        "MODEL": str(model),
        "WHOLE": f"{ROOT}/tests/models/whole_sequence.py",
        "MOE": f"{ROOT}/tests/models/moe.py",
        "ZEROS": "1" + "0" * 50,
        "NINES": "9" * 5000,
        "BRACKETS": "[" * 5000,
        "LONG": "x" * 256,
        "DEEP": "/xx" * 1400,
    }

    def fill(text: str) -> str:
        return re.sub("|".join(words), lambda match: words[match[0]], text)

    return fill


@pytest.fixture
def load(tmp_path: Path, fill: Callable[[str], str]) -> Callable[..., Config]:
    def load(text: str | bytes, *overrides: str, **options: Any) -> Config:
        path = tmp_path / "mine.yaml"
        path.write_bytes(fill(text).encode() if isinstance(text, str) else text)
        return Config.load(str(path), [fill(override) for override in overrides], **options)

    return load


Load = Callable[..., Config]


def load_row(load: Load, row: Mapping[str, Any]) -> Config:
    options = {name: row[name] for name in ("world_size", "for_training", "device") if name in row}
    return load(text_of(row), *row.get("overrides", ()), **options)


def refused(load: Load, text: str | bytes, *overrides: str, **options: Any) -> list[ConfigError]:
    with pytest.raises(ConfigErrors) as caught:
        load(text, *overrides, **options)
    return caught.value.errors


# Broken configs -----------------------------------------------------------------------------------


def test_broken(load: Load) -> None:
    problems = {
        name: problem for name, row in BROKEN.items() if (problem := wrongly_refused(load, row))
    }
    assert not problems, "\n".join(f"{name}: {problem}" for name, problem in problems.items())


def wrongly_refused(load: Load, row: Mapping[str, Any]) -> str:
    """What is wrong with the errors of a broken config; empty if they are those of its row."""
    try:
        load_row(load, row)
    except ConfigErrors as refusal:
        errors = refusal.errors
    else:
        return "it is accepted"
    messages = "\n".join(map(str, errors))
    expected = [
        (line, *texts[i : i + 2])
        for line, texts in row["says"].items()
        for i in range(0, len(texts), 2)
    ]
    if len(errors) != len(expected):
        return f"expected {len(expected)} errors: {messages}"
    for error, (line, what, remedy) in zip(errors, expected, strict=True):
        if error.place.line != line or what not in str(error) or remedy not in error.message:
            return f"expected {what!r} and {remedy!r} of line {line}: {messages}"
    if row.get("schema") == "rejects" and valid(text_of(row)):
        return "the schema accepts it"
    return ""


def test_paths_that_cannot_be(load: Load) -> None:
    for key in ACCEPTED["paths"]:
        for value, (what, remedy) in ACCEPTED["wrong paths"].items():
            (error,) = refused(load, plus(), f"{key}={value}")
            assert what in str(error), (key, value)
            assert remedy in error.message, (key, value)


def test_the_block_is_sorted_and_each_line_has_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(
        "model: {name: llama}\nbatch: {global_size: 0, micro_size: x}\ntrain: {step: 1}\n"
    )
    with pytest.raises(InputError) as caught:
        Config.load("mine.yaml", ["optimizer.lr=0"])
    lines = str(caught.value).splitlines()
    assert lines[0] == "mine.yaml: 4 errors"
    places = [re.match(r"mine\.yaml:\d|command line: [^:]*", line) for line in lines[1:]]
    assert [place and place[0] for place in places] == [
        "mine.yaml:2",
        "mine.yaml:2",
        "mine.yaml:3",
        "command line: optimizer.lr=0",
    ]
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_every_key_that_is_gone_is_named_with_what_replaces_it(load: Load) -> None:
    """All of them at once, as they stand in the resolved config of an older run."""
    sections: dict[str, Any] = {}
    for name in REMOVED:
        section, *path, key = name.split(".")
        keys = sections.setdefault(section, {})
        for parent in path:
            # of the one entry of a list
            keys = keys.setdefault(parent, [{}])[0]
        keys[key] = None
    older = yaml.safe_load(plus())
    for section, keys in sections.items():
        older[section] = older.get(section, {}) | keys
    messages = "\n".join(error.message for error in refused(load, yaml.safe_dump(older)))
    for name, instead in REMOVED.items():
        pattern = re.escape(f"{name} is no longer a key: {instead}")
        assert re.search(pattern, messages.replace("[0]", "")), name


def test_the_changelog_names_every_key_that_is_gone() -> None:
    table = (ROOT / "CHANGELOG.md").read_text().partition("| gone | now |")[2]
    gone = "\n".join(row.split("|")[1] for row in re.findall(r"^\|.*\|$", table, re.MULTILINE))
    for name in REMOVED:
        owner, _, key = name.rpartition(".")
        assert f"`{name}`" in gone or (f"`{owner}`" in gone and f"`{key}`" in gone), name


def test_a_checkpoints_config_is_read_without_the_keys_that_are_gone() -> None:
    older = {
        "metrics": {"sinks": [], "tensorboard": False},
        "train": {
            "chaos": [{"fault": "slow", "until": 5}],
            "linear_precision": "mxfp8",
            "on_exit": None,
        },
        "layout": {"tp": 2},
    }
    assert without_removed(older) == {
        "metrics": {"sinks": []},
        "train": {"chaos": [{"fault": "slow"}], "on_exit": None},
        "layout": {"tp": 2},
    }


def test_a_schedule_in_a_file_is_for_its_counts(load: Load, tmp_path: Path) -> None:
    """8 samples of 2 are four microbatches, and each data rank has its share of them."""
    (tmp_path / "mine.csv").write_text(SCHEDULE)
    text = plus(
        f"layout: {{pp: 2}}\npipeline:\n  schedule: {tmp_path}/mine.csv", model="{name: llama}"
    )
    assert load(text, "layout.dp_shard=2").pipeline.schedule.endswith("mine.csv")
    for overrides, problem in (
        ([], "is for 2 microbatches; this is for 4"),
        (["layout.pp=3", "batch.micro_size=4"], "is for 2 ranks; this is for 3"),
        (["batch.micro_size=4", "pipeline.stages_per_rank=2"], "has 1 stage per rank; found 2"),
    ):
        (error,) = refused(load, text, *overrides)
        assert error.place.line == 6
        assert problem in error.message


def test_what_is_not_known_yet_is_no_error(load: Load) -> None:
    """A layout with a -1 is judged where the world is known."""
    text = plus(
        "layout: {pp: -1}\npipeline: {schedule: zbv}", model="{name: llama, num_hidden_layers: 3}"
    )
    assert load(text).layout == {"pp": -1}
    assert load(text, world_size=2).layout == {"pp": -1}
    assert "8 stages" in refused(load, text, world_size=4)[0].message


def test_files_that_are_no_configs(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (error,) = refused(load, b"model: {}\ntrain: {}\n# caf\xe9\n")
    assert error.place.line == 3
    assert "0xe9: save the file as UTF-8" in error.message
    (error,) = refused(load, b"# filler\n" * 200_000)
    assert "1,800,000" in error.message
    monkeypatch.chdir(tmp_path)
    for name in (
        "quickstart",
        "quickstart.yaml",
        "configs/quickstart.yaml",
        "./configs/quickstart.yaml",
    ):
        assert locate.config_path(name) == locate.bundled("configs") / "quickstart.yaml"
    for name in (
        "gone.yaml",
        "/quickstart.yaml",
        "other/configs/quickstart.yaml",
        str(tmp_path / ("x" * 5000)),
    ):
        with pytest.raises(
            InputError, match=r"there is no config .*configs|cannot be read|too long"
        ):
            Config.load(name)


def test_a_home_folder_is_one_wherever_a_path_is_given(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of a user's own; that of a run, the launcher's script and logs have tests where
    they are made."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "own.py").write_text(FILES["plain"] + FILES["one_layer"])
    (tmp_path / "own.csv").write_text(SCHEDULE)
    config = load(
        plus(model="{name: ~/own.py, width: 8}"), "data.source=~/own.py", for_training=True
    )
    code = next(part for part in run_fingerprints(config, {}) if part.name == "the code")
    assert "~/own.py" in code.values
    two_microbatches = plus("layout: {pp: 2}", model="{}", batch="{global_size: 4, micro_size: 2}")
    assert load(two_microbatches, "pipeline.schedule=~/own.csv")


@settings(max_examples=100)
@given(data=st.data())
def test_nothing_else_is_ever_raised(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Any damage to a file is an error with a place, never a crash."""
    text = plus(
        "layout: {dp_shard: 2, tp: 1}\ndata:\n  validation: 0.1",
        model="{name: convnet, channels: [8, 8]}",
    )
    pieces = [
        "\n",
        "  ",
        ": ",
        "- ",
        "{",
        "}",
        "[",
        "]",
        "&a ",
        "*a",
        "!x ",
        "? ",
        "'",
        "-1",
        "\x00",
    ]
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text)))
        text = (
            text[:at]
            + data.draw(st.sampled_from(pieces))
            + text[at + data.draw(st.integers(0, 3)) :]
        )
    path = tmp_path_factory.getbasetemp() / "damaged.yaml"
    path.write_text(text)
    errors = []
    try:
        Config.load(str(path), world_size=2)
    except ConfigErrors as refusal:
        errors = refusal.errors
    assert all(isinstance(error.place, Place) and error.message for error in errors)


# What is right ------------------------------------------------------------------------------------


def test_accepted(load: Load) -> None:
    for name, row in ACCEPTED["configs"].items():
        text = load_row(load, row).to_yaml()
        assert valid(text), name
        assert valid(text_of(row).removeprefix("\ufeff")), name
        resolved = read_back(text).plain
        for section, expected in row.get("gives", {}).items():
            values = {key: resolved[section][key] for key in expected}
            assert repr(values) == repr(expected), name  # 1 is not 1.0


def test_empty_sections_have_the_defaults(load: Load) -> None:
    config = load_row(load, ACCEPTED["configs"]["defaults"])
    assert (config.name, config.optimizer.betas, config.overrides) == ("mine", (0.9, 0.95), ())
    assert load_row(load, ACCEPTED["configs"]["empty sections"]) == config


def test_a_pasted_hugging_face_config(load: Load) -> None:
    pasted = (HERE / "llama-3.2-1b.json").read_text()
    keys = load(plus(model=pasted)).model.keys
    assert keys["head_dim"] == 64
    assert keys == load(plus(model="{preset: llama-3.2-1b}")).model.keys
    (error,) = refused(
        load, plus(model=pasted.replace('"attention_bias": false', '"attention_bias": true'))
    )
    assert error.place.line == 6


def test_missing_files_are_found_before_training_and_not_for_a_plan(
    load: Load, tmp_path: Path
) -> None:
    text = plus(f"data: {{source: megatron, path: {tmp_path}/corpus}}")
    assert load(text).data.path == f"{tmp_path}/corpus"
    assert refused(load, text, for_training=True)
    for ending in (".bin", ".idx"):
        (tmp_path / f"corpus{ending}").touch()
    assert load(text, for_training=True)
    assert load(text.replace("corpus", "corpus.idx"), for_training=True)


def test_heads_of_cp_are_the_layouts(load: Load) -> None:
    text = plus(
        "layout: {cp: 4, dp_shard: -1, tp: 2}\nparallel: {context_heads: 2}", model="{name: llama}"
    )
    layout = load(text, world_size=8, for_training=True).resolved
    assert (layout.size("cp_heads"), layout.size("cp_ring")) == (2, 2)
    # A layout without cp has no use for them: a config stays one config on one process.
    assert load(text, "layout={dp_shard: -1}", world_size=3).resolved.size("cp_heads") == 1


def test_lengths_of_time(load: Load) -> None:
    for text, length in ACCEPTED["seconds"].items():
        assert load(plus(), f"train.time_limit={text}").train.time_limit_s == length, text
    assert load(plus()).train.time_limit_s is None
    for text in ACCEPTED["no lengths of time"]:
        with pytest.raises(ValueError, match="is no length of time"):
            seconds(text)


# Overrides ----------------------------------------------------------------------------------------


def test_overrides_say_what_they_replace(load: Load, tmp_path: Path) -> None:
    config = load(
        plus(), "train.steps=50", "optimizer.lr=1e-3", "train.steps=60", "train.output=a b"
    )
    assert (config.train.steps, config.optimizer.lr, config.train.output) == (60, 1e-3, "a b")
    assert config.overrides == (
        f"train.steps = 50 (command line; the file says 100 at {tmp_path / 'mine.yaml'}:3)",
        "optimizer.lr = 0.001 (command line; the file does not give it)",
        "train.steps = 60 (command line; in place of 50 from earlier on the command line: "
        "train.steps=50)",
        "train.output = a b (command line; the file does not give it)",
    )
    head = config.to_yaml().splitlines()[:2]
    assert head[0].startswith(f"# The resolved config of a run, from {tmp_path / 'mine.yaml'}")
    assert head[1] == f"# {config.overrides[0]}"


def test_overrides_of_the_layout(load: Load) -> None:
    for layout, overrides, expected in ACCEPTED["layouts"]:
        config = load(plus(layout, model="{name: llama}"), *overrides)
        assert list(config.layout.items()) == list(expected.items()), (layout, overrides)


# YAML 1.2 -----------------------------------------------------------------------------------------


def test_scalars_of_yaml_1_2() -> None:
    for text, value in [*ACCEPTED["scalars"], *((text, text) for text in ACCEPTED["texts"])]:
        assert repr(read_scalar(text)) == repr(value), text
    assert repr(read_scalar(".nan")) == repr(read_scalar(".NaN")) == "nan"


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x7f")).filter(
        str.isprintable
    )
    | st.sampled_from(
        [
            "1e-3",
            "0o17",
            "yes",
            "no",
            "1_000",
            "null",
            "~",
            "<<",
            "=",
            "2001-01-01",
            "*a",
            "",
            "a: b",
        ]
    )
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text("ab_1 :#e-", max_size=5), inner, max_size=4)
    ),
)


def read_back(text: str) -> Node:
    errors: list[Any] = []
    node = read_text(text, lambda line, column: Place.in_file("it", line, column), errors)
    assert not errors, "\n".join(map(str, errors))
    assert node is not None
    return node


@settings(max_examples=100)
@given(st.dictionaries(st.text("ab_1 :#e-", max_size=5), VALUES, max_size=4))
def test_what_is_written_is_read_back(value: dict[str, Any]) -> None:
    assert repr(read_back(write(value)).plain) == repr(value)  # 1 is not 1.0 here, nor True


# The resolved config ------------------------------------------------------------------------------

TEXTS = st.sampled_from(
    ["1e-3", "yes", "null", "0o17", "a: b", "# x", "ü", " x ", "*a", "12", "-", "'", '"', "a\nb"],
)  # fmt: skip
FLOATS = st.floats(1e-12, 1e12)
AXES = ("pp", "dp_shard", "dp_replicate")
SOME_OVERRIDES = {
    "train.output": TEXTS,
    "train.seed": st.integers(0, 2**63 - 1),
    "train.time_limit": st.none() | FLOATS | st.just("3h50m"),
    "train.precision": st.sampled_from(["float64", "float16"]),
    "checkpoint.every": st.just("epoch") | st.integers(0),
    "optimizer.lr": st.floats(1, 1e6),
    "optimizer.betas": st.lists(st.floats(0, 0.875, width=32), min_size=2, max_size=2),
    "data.validation": TEXTS | st.floats(0, 0.99),
    "parallel.compile": st.sampled_from(("auto", True, False)),
    "metrics.profile": st.none() | st.just([10, 15]),
    "model.words": st.lists(TEXTS | st.just("")),
    "model.sizes": st.lists(st.integers()),
    "model.shares": st.dictionaries(TEXTS, FLOATS),
    "model.scaling": st.none() | st.dictionaries(TEXTS, SCALARS, max_size=3),
    "model.head_dim": st.none() | st.integers(),
    "layout": st.permutations(AXES).map(lambda axes: dict(zip(axes, (2, -1, 3), strict=True))),
}


@settings(max_examples=60)
@given(data=st.data())
def test_the_resolved_config_gives_an_equal_one(
    data: st.DataObject, fill: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    keys = data.draw(st.lists(st.sampled_from(sorted(SOME_OVERRIDES)), unique=True))
    overrides = [f"{key}={write(data.draw(evaluated(SOME_OVERRIDES[key])))}" for key in keys]
    folder = tmp_path_factory.mktemp("resolved")
    first, again = folder / "first.yaml", folder / "config.yaml"
    first.write_text(fill(plus()))
    config = Config.load(str(first), overrides)
    again.write_text(config.to_yaml())
    resolved = Config.load(str(again))
    assert resolved == config
    assert repr(asdict(resolved)["model"]) == repr(asdict(config)["model"])
    assert list(resolved.layout) == list(config.layout)
    assert resolved.overrides == ()
    assert list(config.plain()) == list(NAMES)


# What is generated --------------------------------------------------------------------------------


def valid(text: str) -> bool:
    import jsonschema

    config = read_back(text.replace("MODEL", "my.py")).plain
    return jsonschema.Draft7Validator(config_docs.schema()).is_valid(config)


def test_the_schemas_optimizers_are_those_of_the_registry() -> None:
    assert get_args(OptimizerName) == tuple(OPTIMIZERS)


def test_the_published_files_are_current() -> None:
    import jsonschema

    hint = "run `python -m meshtrain.config.docs`"
    assert (ROOT / "configs" / "schema.json").read_text(
        encoding="utf-8"
    ) == config_docs.schema_text(), hint
    assert (ROOT / "docs" / "configuration.md").read_text(
        encoding="utf-8"
    ) == config_docs.markdown(), hint
    schema = json.loads(config_docs.schema_text())
    jsonschema.Draft7Validator.check_schema(schema)
    for section in set(schema["properties"]) - {"model"}:
        for key, about in schema["properties"][section]["properties"].items():
            assert about["description"].endswith("."), f"{section}.{key}"


def test_the_schema_accepts_the_configs() -> None:
    for name in locate.names("configs", ".yaml"):
        assert valid((ROOT / "configs" / f"{name}.yaml").read_text(encoding="utf-8")), name
        Config.load(f"configs/{name}.yaml")


def test_the_example_in_the_docs_runs(load: Load) -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", config_docs.markdown(), re.DOTALL)
    assert load(example, "train.steps=50", "optimizer.lr=1e-3").train.steps == 50
