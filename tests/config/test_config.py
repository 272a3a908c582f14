"""Reading a config: what is refused and how, overrides, numbers, the resolved config, the published schema."""

import json
import pickle
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from meshtrain.config import NAMES, Config, ConfigErrors, locate
from meshtrain.config import docs as config_docs
from meshtrain.config.convert import seconds
from meshtrain.config.errors import Place
from meshtrain.config.yaml_reader import Node, read_scalar, read_text, write
from meshtrain.errors import InputError
from meshtrain.job.consistency import run_fingerprints
from tests.config.broken_configs import BROKEN, MODEL_FILE, ONE_LAYER, PLANS, Broken, plus
from tests.properties import evaluated, given, settings, st

FOLDER = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a plain model file; beside it lie files that are no models."""
    path = tmp_path_factory.mktemp("model") / "plain.py"
    path.write_text(MODEL_FILE)
    typed = "from dataclasses import dataclass\nfrom pathlib import Path\n@dataclass\nclass Config:\n    place: Path\n"
    others = {"wrong": "\nclass (:\n", "empty": "x = 1\n", "imports": "import no_such_package\n", "type": typed}
    others |= {"raises": "raise ValueError('no')\n", "exits": "raise SystemExit(0)\n", "asserts": "assert 0, 'why'\n"}
    others["unbuilt"] = MODEL_FILE.replace("        self.config = config\n", "        raise RuntimeError('too wide')\n")
    others |= {name: f"{MODEL_FILE}{ONE_LAYER}{plan}\n" for name, plan in PLANS.items()}
    for name, text in others.items():
        Path(f"{path}.{name}.py").write_text(text)
    return str(path)


@pytest.fixture
def load(tmp_path: Path, model: str) -> Any:
    def load(text: str | bytes, *overrides: str, **given: Any) -> Config:
        path = tmp_path / "mine.yaml"
        path.write_bytes(text.replace("MODEL", model).encode() if isinstance(text, str) else text)
        return Config.load(str(path), overrides, **given)

    return load


def refused(load: Any, text: str | bytes, *overrides: str, **given: Any) -> list[Any]:
    with pytest.raises(ConfigErrors) as caught:
        load(text, *overrides, **given)
    return caught.value.errors


# Broken configs -----------------------------------------------------------------------------------------------------


def test_the_table_is_large() -> None:
    assert len({case.name for case in BROKEN}) == len(BROKEN) >= 70


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.name)
def test_broken(load: Any, case: Broken) -> None:
    errors = refused(
        load, case.text, *case.overrides, world_size=case.world_size, for_training=case.for_training, device=case.device
    )
    assert [error.place.line for error in errors] == [one.line for one in case.errors], "\n".join(map(str, errors))
    unmatched = list(errors)
    for one in case.errors:
        match = [error for error in unmatched if error.place.line == one.line and one.what in str(error)]
        assert match, f"{one.what!r} is not said in: " + "\n".join(map(str, errors))
        assert one.out in match[0].message
        unmatched.remove(match[0])


def test_the_block_is_sorted_and_each_line_has_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("model: {name: llama}\nbatch: {global_size: 0, micro_size: x}\ntrain: {step: 1}\n")
    with pytest.raises(InputError) as caught:
        Config.load("mine.yaml", ["optimizer.lr=0"])
    lines = str(caught.value).splitlines()
    assert lines[0] == "mine.yaml: 4 errors"
    assert [re.match(r"mine\.yaml:\d|command line: [^:]*", line)[0] for line in lines[1:]] == [  # type: ignore[index]
        "mine.yaml:2",
        "mine.yaml:2",
        "mine.yaml:3",
        "command line: optimizer.lr=0",
    ]
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_schedule_in_a_file_is_for_its_counts(load: Any, tmp_path: Path) -> None:
    """8 samples of 2 are four microbatches, and each data rank has its share of them."""
    (tmp_path / "mine.csv").write_text("0F0,0F1,,,0B0,0B1\n,1F0,1B0,1F1,1B1\n")
    text = plus(f"layout: {{pp: 2}}\npipeline:\n  schedule: {tmp_path}/mine.csv\n", model="{name: llama}")
    assert load(text, "layout.dp_shard=2").pipeline.schedule.endswith("mine.csv")
    for overrides, problem in (
        ([], "is for 2 microbatches; this is for 4"),
        (["layout.pp=3", "batch.micro_size=4"], "is for 2 ranks; this is for 3"),
        (["batch.micro_size=4", "pipeline.stages_per_rank=2"], "has 1 stage per rank; found 2"),
    ):
        (error,) = refused(load, text, *overrides)
        assert error.place.line == 6
        assert problem in error.message


def test_what_is_not_known_yet_is_no_error(load: Any) -> None:
    """A layout with a -1 is judged where the world is known."""
    text = plus("layout: {pp: -1}\npipeline: {schedule: zbv}\n", model="{name: llama, num_hidden_layers: 3}")
    assert load(text).layout == {"pp": -1}
    assert load(text, world_size=2).layout == {"pp": -1}
    assert "8 stages" in refused(load, text, world_size=4)[0].message


def test_a_file_that_is_no_text(load: Any) -> None:
    (error,) = refused(load, b"model: {}\ntrain: {}\n# caf\xe9\n")
    assert error.place.line == 3
    assert "0xe9: save the file as UTF-8" in error.message
    (error,) = refused(load, b"# filler\n" * 200_000)
    assert "1,800,000" in error.message
    assert load(("\ufeff" + plus(model="{}")).encode()).train.steps == 100  # a byte-order mark is fine


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no config gone\.yaml .*configs"):
        Config.load("gone.yaml")
    with pytest.raises(InputError):
        Config.load(str(tmp_path / ("x" * 5000)))


def test_only_the_names_of_meshtrains_own_configs_lead_to_them(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("quickstart", "quickstart.yaml", "configs/quickstart.yaml", "./configs/quickstart.yaml"):
        assert locate.config_path(name) == locate.bundled("configs") / "quickstart.yaml"
    for name in ("/nonexistent/configs/quickstart.yaml", "/quickstart.yaml", "other/configs/quickstart.yaml"):
        with pytest.raises(InputError, match=r"there is no config .*configs/quickstart\.yaml"):
            Config.load(name)


def test_a_home_folder_is_one_wherever_a_path_is_given(load: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """The files of a user's own; that of a run, the launcher's script and logs have tests where they are made."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "own.py").write_text(f"{MODEL_FILE}{ONE_LAYER}")
    (tmp_path / "own.csv").write_text("0F0,0F1,,,0B0,0B1\n,1F0,1B0,1F1,1B1\n")
    config = load(plus(model="{name: ~/own.py, width: 8}"), "data.source=~/own.py", for_training=True)
    assert {"~/own.py"} <= next(one for one in run_fingerprints(config, {}) if one.name == "the code").values.keys()
    assert load(plus("layout: {pp: 2}\n", "{}", "{global_size: 4, micro_size: 2}"), "pipeline.schedule=~/own.csv")


def test_places_sort_as_a_person_reads() -> None:
    places = [Place.in_file("a", 2), Place.in_file("a", 10), *(Place.on_command_line(n, "x=1") for n in (1, 2))]
    assert sorted([places[i] for i in (3, 1, 0, 2)]) == places


@settings(max_examples=100)
@given(data=st.data())
def test_nothing_else_is_ever_raised(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Any damage to a file is an error with a place, never a crash."""
    text = plus("layout: {dp_shard: 2, tp: 1}\ndata:\n  validation: 0.1\n", model="{name: convnet, channels: [8, 8]}")
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text)))
        piece = data.draw(
            st.sampled_from(["\n", "  ", ": ", "- ", "{", "}", "[", "]", "&a ", "*a", "!x ", "? ", "'", "-1", "\x00"])
        )
        text = text[:at] + piece + text[at + data.draw(st.integers(0, 3)) :]
    path = tmp_path_factory.getbasetemp() / "damaged.yaml"
    path.write_text(text)
    errors = []
    try:
        Config.load(str(path), world_size=2)
    except ConfigErrors as error:
        errors = error.errors
    assert all(isinstance(one.place, Place) and one.message for one in errors)


# What is right ------------------------------------------------------------------------------------------------------


def test_defaults(load: Any) -> None:
    config = load(plus(model="{name: llama}"))
    assert (config.name, config.train.output, config.layout) == ("mine", "runs/mine", {"dp_shard": -1})
    assert (config.model.preset, config.model.keys["hidden_size"], config.model.keys["rope_scaling"]) == (
        None,
        256,
        None,
    )
    assert (config.data.source, config.data.validation) == ("python-stdlib", 0.02)
    assert (config.optimizer.betas, config.optimizer.clip_norm, config.overrides) == ((0.9, 0.95), 1.0, ())
    assert load(plus("data:\nlayout: null\nmetrics:\n", model="{}")) == config  # an empty section is no section


def test_values_are_converted_as_the_dataclasses_ask(load: Any) -> None:
    model = (
        "{name: MODEL, width: 8, scale: 2, kind: sparse, sizes: [3, 4, 5], span: [1, 2.5], scaling: {a: [1, {b: x}]}}"
    )
    extra = "optimizer: {lr: 1, clip_norm: null}\ndata: {validation: 0}\nmetrics: {profile: [3, 9]}\n"
    config = load(plus(extra, model, train="{steps: 100, eval_every: epoch}"))
    keys = config.model.keys
    assert (keys["kind"], keys["sizes"], keys["span"]) == ("sparse", (3, 4, 5), (1.0, 2.5))
    assert keys["scaling"] == {"a": [1, {"b": "x"}]}
    for value in (keys["scale"], config.optimizer.lr, config.data.validation, keys["span"][0]):
        assert isinstance(value, float)
    assert (config.optimizer.clip_norm, config.metrics.profile, config.train.eval_every) == (None, (3, 9), "epoch")


def test_a_preset_is_overridden_by_the_keys_beside_it(load: Any) -> None:
    config = load(plus(model="{name: MODEL, preset: large, heads: 8}"), "model.width=32")
    assert (config.model.keys["width"], config.model.keys["heads"]) == (32, 8)


def test_a_pasted_hugging_face_config(load: Any) -> None:
    pasted = {
        "_name_or_path": "meta-llama/Llama-3.2-1B", "architectures": ["LlamaForCausalLM"], "attention_bias": False,
        "attention_dropout": 0.0, "bos_token_id": 128000, "eos_token_id": 128001, "head_dim": 64, "hidden_act": "silu",
        "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 131072,
        "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16,
        "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                         "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.45.0.dev0", "use_cache": True, "vocab_size": 128256,
    }  # fmt: skip
    config = load(plus(model=json.dumps(pasted, indent=2)))
    assert config.model.keys["head_dim"] == 64
    assert config.model.keys == load(plus(model="{preset: llama-3.2-1b}")).model.keys
    (error,) = refused(load, plus(model=json.dumps(pasted | {"attention_bias": True}, indent=2)))
    assert error.place.line == 6


def test_missing_files_are_found_before_training_and_not_for_a_plan(load: Any, tmp_path: Path) -> None:
    text = plus("data: {source: megatron, path: corpus}\n").replace("corpus", str(tmp_path / "corpus"))
    assert load(text).data.path == str(tmp_path / "corpus")
    assert refused(load, text, for_training=True)
    for ending in (".bin", ".idx"):
        (tmp_path / f"corpus{ending}").touch()
    assert load(text, for_training=True)
    assert load(text.replace("corpus", "corpus.idx"), for_training=True)


def test_cp_is_trained_and_its_heads_are_the_layouts(load: Any) -> None:
    text = plus("layout: {cp: 4, dp_shard: -1, tp: 2}\nparallel: {context_heads: 2}\n", model="{name: llama}")
    config = load(text, world_size=8, for_training=True)
    assert config.layout == {"cp": 4, "dp_shard": -1, "tp": 2}
    assert (config.resolved.size("cp_heads"), config.resolved.size("cp_ring")) == (2, 2)
    # A layout without cp has no use for them: a config stays one config on one process.
    assert load(text, "layout={dp_shard: -1}", world_size=3).resolved.size("cp_heads") == 1


def test_with_cp_sequences_need_not_divide_over_tp(load: Any) -> None:
    text = plus("data: {seq_len: 33}\nlayout: {cp: 2, tp: 2}\n", model="{name: llama}")
    assert load(text, world_size=4, for_training=True)
    assert "does not divide over layout.tp" in refused(load, text, "layout.cp=1", world_size=2)[0].message


def test_symmetric_memory_is_refused_only_where_it_would_be_used(load: Any) -> None:
    text = plus("parallel: {symmetric_memory: true}\nlayout: {dp_shard: 2, tp: -1}\n", model="{name: llama}")
    for world_size, device in ((2, "cpu"), (4, "cuda"), (4, None)):  # tp 1, 2 and 2
        assert load(text, world_size=world_size, device=device).parallel.symmetric_memory
    assert len(refused(load, text, world_size=4, device="cpu")) == 1


@pytest.mark.parametrize(
    ("written", "length"),
    [("3h50m", 13800), ("90s", 90), ("2d", 172800), ("1d 2h", 93600), ("1h1s", 3601), ("600", 600), ("0.5", 0.5)],
)
def test_a_time_limit_is_a_length_of_time(load: Any, written: str, length: float) -> None:
    assert load(plus(), f"train.time_limit={written}").train.time_limit_s == length
    assert load(plus()).train.time_limit_s is None


@pytest.mark.parametrize("text", ["", "h", "5", "1.5h", "5m3h", "3 hours", "-5s", "٣s", "1h\n2"])
def test_what_is_no_length_of_time(text: str) -> None:
    with pytest.raises(ValueError, match="is no length of time"):
        seconds(text)


@pytest.mark.parametrize(
    ("section", "train"),
    [
        ("every: 100, keep_every: 300, keep_best: true", "eval_every: 50"),
        ("every: epoch, keep_best: true", "eval_every: epoch"),
        ("every: 0, keep_last: 1, resume: none", "eval_every: 0"),
        ("every: 30", "eval_every: 7"),
    ],
)
def test_checkpoints_that_go_together(load: Any, section: str, train: str) -> None:
    config = load(plus(f"checkpoint: {{{section}}}\n", train=f"{{steps: 100, {train}}}"))
    assert config.checkpoint.on_failure == "continue"
    assert valid(config.to_yaml())


def test_the_plain_values_are_those_that_are_written(load: Any) -> None:
    config = load(plus("layout: {tp: 1, dp_shard: -1}\n"))
    plain = config.plain()
    assert list(plain) == list(NAMES)
    assert plain["layout"] == {"tp": 1, "dp_shard": -1}
    assert plain["model"]["width"] == 8
    assert plain["checkpoint"]["resume"] == "latest"
    assert json.loads(json.dumps(plain))["optimizer"]["betas"] == [0.9, 0.95]


# Overrides ----------------------------------------------------------------------------------------------------------


def test_overrides_say_what_they_replace(load: Any, tmp_path: Path) -> None:
    config = load(plus(), "train.steps=50", "optimizer.lr=1e-3", "train.steps=60", "train.output=a b")
    assert (config.train.steps, config.optimizer.lr, config.train.output) == (60, 1e-3, "a b")
    assert config.overrides == (
        f"train.steps = 50 (command line; the file says 100 at {tmp_path / 'mine.yaml'}:3)",
        "optimizer.lr = 0.001 (command line; the file does not give it)",
        "train.steps = 60 (command line; in place of 50 from earlier on the command line: train.steps=50)",
        "train.output = a b (command line; the file does not give it)",
    )


@pytest.mark.parametrize(
    ("layout", "overrides", "expected"),
    [
        ("", ["layout.tp=8"], [("dp_shard", -1), ("tp", 8)]),
        ("", ["layout.pp=2", "layout.dp_replicate=2"], [("pp", 2), ("dp_replicate", 2), ("dp_shard", -1)]),
        ("layout: {dp_shard: 4}\n", ["layout.dp_shard=2"], [("dp_shard", 2)]),
        ("layout: {pp: 2, tp: 2}\n", ["layout.cp=2"], [("pp", 2), ("cp", 2), ("tp", 2)]),
        ("layout: {tp: 2, pp: 2}\n", ["layout.dp_shard=4"], [("dp_shard", 4), ("tp", 2), ("pp", 2)]),
        ("layout: {pp: 2}\n", ["layout={tp: 2, dp_shard: 2}"], [("tp", 2), ("dp_shard", 2)]),
        ("layout: {pp: 2}\n", ["layout=null"], [("dp_shard", -1)]),
    ],
)  # fmt: skip
def test_overrides_of_the_layout(load: Any, layout: str, overrides: list[str], expected: list[tuple[str, int]]) -> None:
    assert list(load(plus(layout, model="{name: llama}"), *overrides).layout.items()) == expected


def test_overrides_make_sections_and_take_values_away(load: Any) -> None:
    config = load(
        plus("data: {source: text, path: x}\n"), "data.source=digits", "data.path=null", "metrics.tensorboard=true"
    )
    assert (config.data.source, config.data.path, config.metrics.tensorboard) == ("digits", None, True)
    config = load(plus(), "model.scaling.factor=2", "train.steps=null", "train.epochs=3", "data={seq_len: 8}")
    assert (config.model.keys["scaling"], config.train.steps, config.train.epochs) == ({"factor": 2}, None, 3)
    assert config.data.seq_len == 8


# YAML 1.2 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3), ("1E3", 1e3), ("-.5", -0.5), ("3.", 3.0), ("+1.5e+2", 150.0), (".inf", float("inf")),
        ("-.Inf", float("-inf")), ("0", 0), ("-17", -17), ("+5", 5), ("0123", 123), ("0o17", 15), ("0x1F", 31),
        ("null", None), ("~", None), ("", None), ("Null", None), ("true", True), ("FALSE", False),
        ("yes", "yes"), ("no", "no"), ("on", "on"), ("Off", "Off"), ("1_000", "1_000"), ("0b1", "0b1"),
        ("1:30", "1:30"), ("2001-01-01", "2001-01-01"), ("e3", "e3"), ("1e", "1e"), (".", "."), ("tRue", "tRue"),
        ("1\n", "1\n"), ("٣", "٣"), ("-", "-"), ("inf", "inf"), ("nan", "nan"), ("+.nan", "+.nan"),
    ],
)  # fmt: skip
def test_scalars_of_yaml_1_2(text: str, value: object) -> None:
    read = read_scalar(text)
    assert type(read) is type(value)
    assert read == value


def test_not_a_number() -> None:
    assert read_scalar(".nan") != read_scalar(".NaN")


SCALARS = (
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x7f")).filter(str.isprintable)
    | st.sampled_from(["1e-3", "0o17", "yes", "no", "1_000", "null", "~", "<<", "=", "2001-01-01", "*a", "", "a: b"])
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("ab_1 :#e-", max_size=5), inner, max_size=4),
)


def read_back(text: str) -> Node | None:
    errors: list[Any] = []
    node = read_text(text, lambda line, column: Place.in_file("it", line, column), errors)
    assert not errors, "\n".join(map(str, errors))
    return node


@settings(max_examples=100)
@given(st.dictionaries(st.text("ab_1 :#e-", max_size=5), VALUES, max_size=4))
def test_what_is_written_is_read_back(value: dict[str, Any]) -> None:
    node = read_back(write(value))
    assert node is not None
    assert repr(node.plain) == repr(value)  # 1 is not 1.0 here, nor True


# The resolved config ------------------------------------------------------------------------------------------------

TEXTS = ["1e-3", "yes", "null", "0o17", "a: b", "# x", "ü", "", " x ", "*a", "12", "-", "'", '"', "a\nb"]


@st.composite
def overridden(draw: st.DrawFn) -> list[str]:
    texts = st.sampled_from(TEXTS)
    paths = texts.filter(bool)
    floats = st.floats(1e-12, 1e12)
    steps = draw(st.integers(30, 10**9))
    first = draw(st.integers(1, 10))
    choices: dict[str, Any] = {
        "train.output": paths,
        "train.seed": st.integers(0, 2**63 - 1),
        "train.step_timeout_s": st.none() | floats,
        "train.time_limit": st.none() | floats | st.just("3h50m"),
        "checkpoint.path": st.none() | paths,
        "checkpoint.every": st.just("epoch") | st.integers(0),
        "train.eval_every": st.just("epoch") | st.integers(0),
        "train.precision": st.sampled_from(["float64", "float16"]),
        "optimizer.lr": st.floats(1, 1e6),
        "optimizer.clip_norm": st.none() | floats,
        "optimizer.eps": floats,
        "optimizer.betas": st.lists(st.floats(0, 0.875, width=32), min_size=2, max_size=2),
        "data.cache": st.none() | paths,
        "data.validation": paths | st.floats(0, 0.99),
        "parallel.compile": st.sampled_from(("auto", True, False)),
        "metrics.profile": st.none() | st.just([first, first + 5]),
        "model.heads": st.sampled_from([1, 2, 4]),
        "model.words": st.lists(texts),
        "model.sizes": st.lists(st.integers()),
        "model.shares": st.dictionaries(texts, floats),
        "model.scaling": st.none() | st.dictionaries(texts, evaluated(SCALARS), max_size=3),
        "model.head_dim": st.none() | st.integers(),
        "layout": st.permutations(["pp", "dp_shard", "dp_replicate"]).map(
            lambda axes: dict(zip(axes, (2, -1, 3), strict=True))
        ),
    }
    named = draw(st.lists(st.sampled_from(sorted(choices)), unique=True))
    return [f"train.steps={steps}"] + [f"{name}={write(draw(choices[name]))}" for name in named]


@settings(max_examples=60)
@given(overrides=overridden())
def test_the_resolved_config_gives_an_equal_one(overrides: list[str], model: str, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("resolved")
    first = folder / "first.yaml"
    first.write_text(plus().replace("MODEL", model))
    config = Config.load(str(first), overrides)
    again = folder / "config.yaml"
    again.write_text(config.to_yaml())
    resolved = Config.load(str(again))
    assert resolved == config
    assert repr(asdict(resolved)["model"]) == repr(asdict(config)["model"])
    assert list(resolved.layout) == list(config.layout)
    assert resolved.overrides == ()


def test_the_resolved_config_names_its_origin(load: Any, tmp_path: Path) -> None:
    head = load(plus(), "train.steps=50").to_yaml().splitlines()[:2]
    assert head[0].startswith(f"# The resolved config of a run, from {tmp_path / 'mine.yaml'}")
    assert head[1].startswith("# train.steps = 50 (command line; the file says 100 at ")


# What is generated --------------------------------------------------------------------------------------------------

SCHEMA = config_docs.schema()


def valid(text: str) -> bool:
    node = read_back(text)
    assert node is not None
    return jsonschema.Draft7Validator(SCHEMA).is_valid(node.plain)


def test_the_published_files_are_current() -> None:
    hint = "run `python -m meshtrain.config.docs`"
    assert (FOLDER / "configs" / "schema.json").read_text(encoding="utf-8") == config_docs.schema_text(), hint
    assert (FOLDER / "docs" / "configuration.md").read_text(encoding="utf-8") == config_docs.markdown(), hint


def test_the_schema_is_one() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)


def test_every_key_is_documented() -> None:
    for section in set(SCHEMA["properties"]) - {"model"}:
        for key, about in SCHEMA["properties"][section]["properties"].items():
            assert about["description"].endswith("."), f"{section}.{key}"


def test_the_schema_accepts_what_is_right(load: Any) -> None:
    assert valid(plus("data:\nlayout: {dp_shard: -1}\noptimizer: {betas: [0, 0.5]}\n", model="{name: my.py, any: 1}"))
    assert valid(plus(model="{preset: llama-3.2-1b, torch_dtype: x, attention_bias: false, head_dim: null}"))
    assert valid(plus(model="{name: convnet, channels: [8]}", train="{epochs: 3, eval_every: epoch}"))
    assert valid(load(plus(model="{name: llama}")).to_yaml())


@pytest.mark.parametrize("name", locate.names("configs", ".yaml"))
def test_the_schema_accepts_the_configs(name: str) -> None:
    text = (FOLDER / "configs" / f"{name}.yaml").read_text(encoding="utf-8")
    node = read_back(text)
    assert node is not None
    jsonschema.Draft7Validator(SCHEMA).validate(node.plain)
    Config.load(f"configs/{name}.yaml")


@pytest.mark.parametrize(
    "text",
    [
        plus("trian: {}\n"),
        plus("data: {seq_len: '3'}\n"),
        plus("data: {validation: 1}\n"),
        plus("layout: {dp: 2}\n"),
        plus("layout: {tp: 0}\n"),
        plus(train="{steps: 1, epochs: 2}"),
        plus(train="{seed: 1}"),
        plus(train="{steps: 5.5}"),
        plus(batch="{global_size: 8}"),
        plus("optimizer: {betas: [0.9]}\n"),
        plus("optimizer: {lr: 0}\n"),
        plus("optimizer: {schedule: cosin}\n"),
        plus("data: {source: texts}\n"),
        plus(model="{name: llama, width: 8}"),
        plus(model="{name: convnet, hidden_size: 8}"),
        plus(model="{attention_bias: true}"),
        plus(model="{preset: huge}"),
        plus("parallel: {compile: 'yes'}\n"),
        "model: {}\nbatch: {global_size: 8, micro_size: 2}\n",
    ],
)
def test_the_schema_rejects_what_is_wrong(text: str) -> None:
    assert not valid(text)


def test_the_example_in_the_docs_runs(load: Any) -> None:
    examples = re.findall(r"```yaml\n(.*?)```", config_docs.markdown(), re.DOTALL)
    assert len(examples) == 1
    assert load(examples[0], "train.steps=50", "optimizer.lr=1e-3").train.steps == 50
