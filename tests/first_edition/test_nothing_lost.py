"""What the first edition documented is still there: keys, names, commands, options, metrics fields, files, statuses.

Beside this file lie that edition's `configs/schema.json`, `docs/metrics.md` and `tools/examples/own_loop.py`.
"""

import argparse
import importlib
import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import meshtrain
from meshtrain.cli.main import COMMANDS, main
from meshtrain.layout import DATA_AXES, Layout
from meshtrain.metrics.logger import read
from meshtrain.pipeline.schedule import NAMES, build
from meshtrain.pipeline.simulate import simulate
from tests.launching import ROOT, Finished, forked, run

HERE = Path(__file__).resolve().parent


def listed(text: str) -> list[str]:
    return text.split()


# Keys ---------------------------------------------------------------------------------------------------------------

Schema = dict[str, Any]
# Defaults that changed since, with the reason: where the old default was possible it is still what happens.
OTHER_DEFAULTS = {
    "parallel.sequence_parallel": "null asks the model's `tp_plan`; llama's has what makes it true",
    "parallel.compile": "auto is true on GPUs, where results stay within rounding; on CPUs it is false as before",
    "parallel.symmetric_memory": "auto is what false was, but on GPUs that are linked by NVLink",
}


def schema_of(path: Path) -> Schema:
    return json.loads(path.read_text())


def alternatives(schema: Schema) -> list[Schema]:
    return [part for option in schema["anyOf"] for part in alternatives(option)] if "anyOf" in schema else [schema]


def keys_of(schema: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    """Every key by its path; the keys of one model's or one fault's alternative carry its title."""
    for alternative in alternatives(schema):
        title = alternative.get("title", "")
        for name, value in alternative.get("properties", {}).items():
            key = ".".join(part for part in (path, f"<{title}>" if title and path else "", name) if part)
            yield key, value
            yield from keys_of(value, key)
            yield from keys_of(value.get("items", {}), key)
    if "anyOf" in schema and "properties" in schema:  # the section `model`: common keys beside each model's own
        yield from keys_of({"properties": schema["properties"]}, path)


def types(schema: Schema) -> set[str]:
    found = schema.get("type", "anything")
    return {found} if isinstance(found, str) else set(found)


def accepts(new: Schema, old: Schema) -> bool:
    """Whether each value that one alternative of the old schema takes is taken by the new schema."""
    return any(_covers(candidate, old) for candidate in alternatives(new))


def _covers(new: Schema, old: Schema) -> bool:
    if "enum" in new:
        return "enum" in old and set(map(repr, old["enum"])) <= set(map(repr, new["enum"]))
    if "enum" in old:
        kinds = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
        return all(new.get("type") in (None, kinds[type(value)]) for value in old["enum"])
    if "type" in new and not types(old) <= types(new) | ({"integer"} if "number" in types(new) else set()):
        return False
    if new.get("pattern", old.get("pattern")) != old.get("pattern"):
        return False
    lower = all(new.get(key, -1e300) <= old.get(key, -1e300) for key in ("minimum", "exclusiveMinimum", "minItems"))
    upper = all(new.get(key, 1e300) >= old.get(key, 1e300) for key in ("maximum", "exclusiveMaximum", "maxItems"))
    items = "items" not in new or accepts(new["items"], old.get("items", {}))
    return lower and upper and items and set(new.get("required", ())) <= set(old.get("required", ()))


OLD_KEYS = list(keys_of(schema_of(HERE / "schema.json")))
NEW_KEYS = list(keys_of(schema_of(ROOT / "configs" / "schema.json")))


def test_there_are_keys_to_compare() -> None:
    paths = {path for path, _ in OLD_KEYS}
    assert len(paths) > 100
    assert {"layout.dp_shard", "train.chaos", "model.<models/llama.py>.hidden_size"} <= paths


@pytest.mark.parametrize("path", dict.fromkeys(path for path, _ in OLD_KEYS))
def test_a_key_takes_what_it_took(path: str) -> None:
    """Each type, choice and bound of a key is still allowed, and what happens without the key is the same."""
    new = [schema for name, schema in NEW_KEYS if name == path]
    assert new, f"{path} is no key any more"
    for old in (schema for name, schema in OLD_KEYS if name == path):
        for alternative in alternatives(old):
            assert any(accepts(schema, alternative) for schema in new), f"{path}: {alternative} is not accepted"
        if "default" in old and path not in OTHER_DEFAULTS:
            assert any(schema.get("default", ...) == old["default"] for schema in new), f"{path}: another default"


def test_the_comparison_sees_what_is_lost() -> None:
    old = {"type": "integer", "minimum": 1}
    assert accepts(old, old)
    assert accepts({"anyOf": [{"type": "null"}, {"type": "number"}]}, old)
    assert accepts({"enum": ["a", "b", "c"]}, {"enum": ["a", "b"]})
    assert not accepts({"type": "string"}, old)
    assert not accepts({"type": "integer", "minimum": 2}, old)
    assert not accepts({"enum": ["a"]}, {"enum": ["a", "b"]})
    assert not accepts({"enum": [1]}, old)


# Metrics ------------------------------------------------------------------------------------------------------------

OLD_METRICS = (HERE / "metrics.md").read_text()
FIELD = re.compile(r"[a-z][a-z0-9]*(?:_[a-z0-9]+)*")
FILE = re.compile(r"(?:[\w<>]+/)*[\w<>]+\.(?:jsonl|json|png|pickle)|tensorboard/")
STEP_FIELDS = listed(
    """
    step epoch loss grad_norm lr tokens samples samples_digest step_time_s tokens_per_s mfu memory_gib time_data_s
    time_forward_s time_backward_s time_communication_s time_optimizer_s time_own_s time_queued_s
    sent_bytes_dp_shard goodput wall_s wall_startup_s wall_training_s wall_data_s wall_evaluation_s wall_saving_s
    wall_repeated_s wall_between_s
    """
)
TINY = listed(
    """
    model.hidden_size=24 model.intermediate_size=32 model.num_hidden_layers=1 data.seq_len=16 data.workers=0
    batch.global_size=4 batch.micro_size=2 optimizer.warmup_steps=0 train.sample_tokens=0 train.eval_samples=8
    parallel.compile=false
    """
)


def words(text: str) -> set[str]:
    """Names in backquotes: fields, parts of the wall time, keys, files."""
    return {word for quoted in re.findall(r"`([^`\n]+)`", text) for word in re.split(r"[,=\s]+", quoted)}


def test_every_documented_field_and_file_is_still_documented() -> None:
    old = {word for word in words(OLD_METRICS) if FIELD.fullmatch(word) or FILE.fullmatch(word)}
    assert set(STEP_FIELDS) <= old
    assert old <= words((ROOT / "docs" / "metrics.md").read_text())


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finished]:
    """Steps on two ranks, long enough for the ranks to be compared."""
    folder = tmp_path_factory.mktemp("runs") / "short"
    steps = ("train.steps=41", "train.eval_every=41", "checkpoint.every=20", "metrics.profile=[2, 2]")
    arguments = ("meshtrain.train", ROOT / "configs/quickstart.yaml", *TINY, *steps, f"train.output={folder}")
    return folder, forked(2, "-m", *arguments).check()


def test_every_documented_field_is_written(short_run: tuple[Path, Finished]) -> None:
    rows = read(short_run[0] / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 42))
    for name in STEP_FIELDS:
        assert all(name in row for row in rows), name
    for name in ("own_time_median_s", "own_time_max_s", "own_time_max_rank", "memory_max_gib"):
        assert any(name in row for row in rows), name
    assert all(rows[-1][name] is not None for name in ("eval_loss", "perplexity", "bits_per_byte"))


def test_every_documented_file_is_written(short_run: tuple[Path, Finished]) -> None:
    folder, finished = short_run
    names = ["config.yaml", "layout.txt", "metrics.jsonl", "goodput.jsonl", "exit.json"]  # loss.png: in test_train.py
    last = "checkpoints/step_0000041"
    names += [f"{last}/{name}" for name in ("manifest.json", "rank_00000.safetensors", "COMPLETE")]
    assert [name for name in [*names, "profile/rank_00000.json"] if not (folder / name).exists()] == []
    ended = json.loads((folder / "exit.json").read_text())
    assert (ended["status"], ended["code"], ended["step"]) == ("done", 0, 41)
    assert {"reason", "goodput"} <= set(ended)
    assert {"jobs", "wall_s", "wall_training_s", "wall_between_s"} <= set(ended["goodput"])
    for text in ("2 processes = 1 host", "global batch 4", "FLOP per sample", "peak ", "wall time ", "(goodput)"):
        assert text in finished.out, text


# Python names -------------------------------------------------------------------------------------------------------

NAMES_OF_CONTRACTS = {
    "meshtrain": ["Layout", "build_mesh", "parallelize", "start"],
    "meshtrain.attention": ["attention", "document_mask"],
    "meshtrain.checkpoint": ["load_weights"],
    "meshtrain.data": ["Document", "write"],
    "meshtrain.data.order": ["batch_samples", "share"],
    "meshtrain.dropout": ["Dropout", "set_dropout"],
    "meshtrain.errors": ["InputError"],
    "meshtrain.layout": ["AXES", "DATA_AXES", "Layout", "LayoutError"],
    "meshtrain.loss": ["GlobalCount", "sample_losses", "valid_targets"],
    "meshtrain.mesh": ["Mesh", "build_mesh"],
    "meshtrain.metrics": ["read"],
    "meshtrain.optim": ["clip_gradients"],
    "meshtrain.pipeline.schedule": ["NAMES", "build"],
    "meshtrain.pipeline.simulate": ["Timeline", "simulate"],
    "meshtrain.plot": ["plot_loss"],
}


@pytest.mark.parametrize("module", NAMES_OF_CONTRACTS)
def test_a_public_name_can_be_imported(module: str) -> None:
    found = importlib.import_module(module)
    assert [name for name in NAMES_OF_CONTRACTS[module] if not hasattr(found, name)] == []


def test_the_contract_of_layouts() -> None:
    layout = Layout({"pp": 2, "dp_shard": 4, "tp": 2})
    assert (layout.world_size, tuple(layout.axes)) == (16, ("pp", "dp_shard", "tp"))
    assert layout.sizes == {"pp": 2, "dp_shard": 4, "tp": 2}
    assert layout.coordinate(5) == {"pp": 0, "dp_shard": 2, "tp": 1}
    assert layout.rank(pp=0, dp_shard=2, tp=1) == 5
    assert layout.groups("tp")[:2] == [[0, 1], [2, 3]]
    assert layout.groups("pp", "dp_shard")[0] == [0, 2, 4, 6, 8, 10, 12, 14]
    assert layout.group(5, "tp") == [4, 5]
    assert Layout.resolve({"pp": 2, "dp_shard": -1, "tp": 2}, world_size=16) == layout
    assert tuple(DATA_AXES) == ("dp_replicate", "dp_shard")


def test_the_contract_of_schedules() -> None:
    documented = "gpipe 1f1b interleaved-1f1b looped-bfs zb-h1 zb-h2 interleaved-zb zbv v-half v-min dualpipev"
    assert set(listed(documented)) <= set(NAMES)
    schedule = build("interleaved-1f1b", ranks=4, microbatches=8, stages_per_rank=2)
    timeline = simulate(schedule, forward=1, input_grad=1, weight_grad=1)
    assert timeline.makespan > 0
    for per_rank in (timeline.idle, timeline.idle_in_span, timeline.peak_activations):
        assert len(per_rank) == 4


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_the_contract_of_a_loop_of_ones_own() -> None:
    from meshtrain.data.order import batch_samples, share
    from meshtrain.loss import GlobalCount
    from meshtrain.mesh import Mesh
    from meshtrain.optim import clip_gradients
    from meshtrain.parallel.parallelize import ParallelOptions

    assert parameters(batch_samples)[:4] == ["seed", "step", "global_batch", "n_samples"]
    assert sorted(batch_samples(0, 0, 8, 8)) == list(range(8))
    assert [list(share(5, 2, index)) for index in (0, 1)] == [[0, 1], [2, 3, 4]]
    assert parameters(clip_gradients)[:3] == ["model", "mesh", "max_norm"]
    assert parameters(GlobalCount)[:3] == ["count", "mesh", "device"]
    assert parameters(meshtrain.parallelize)[:2] == ["model", "mesh"]
    assert {"precision", "tp_plan", "sequence_parallel"} <= {field.name for field in fields(ParallelOptions)}
    assert parameters(meshtrain.build_mesh)[0] == "layout"
    for name in ("size", "index", "group", "submesh", "sum", "speaks_for_samples"):
        assert hasattr(Mesh, name), name


def test_the_first_editions_own_loop_runs() -> None:
    """Its text as it was, with few steps."""
    text = (HERE / "own_loop.py").read_text()
    assert "STEPS = 64, 50" in text
    short = text.replace("STEPS = 64, 50", "STEPS = 64, 3")
    alone = run([sys.executable, "-c", short]).check().out
    assert re.search(r": loss \d\.\d{9}, gradient norm \d\.\d{9} after 3 steps", alone)


# Commands -----------------------------------------------------------------------------------------------------------

OPTIONS_OF_TORCHRUN = listed(
    """
    --nnodes --nproc-per-node --rdzv-backend --rdzv-endpoint --rdzv-id --rdzv-conf --node-rank --master-addr
    --master-port --local-addr --standalone --max-restarts --monitor-interval --start-method --event-log-handler
    --role --log-dir --redirects --tee --local-ranks-filter --logs-specs --numa-binding --signals-to-handle
    --shutdown-timeout --duplicate-stdout-filters --duplicate-stderr-filters --no-python --run-path
    --virtual-local-rank
    """
)
# command -> its positional arguments, its options
ARGUMENTS = {
    "plan": ("config overrides", "--hosts --parameters --json"),
    "doctor": (
        "config overrides",
        " ".join(
            ["--local --wait --json -m --module -r -t", *OPTIONS_OF_TORCHRUN]
            + ["--" + name[2:].replace("-", "_") for name in OPTIONS_OF_TORCHRUN]
        ),
    ),
    "launch": (
        "config overrides",
        "--dry-run --slurm --nodes --gpus-per-node --srun --gres --cpus-per-task --time --partition --account "
        "--job-name --activate --env",
    ),
    "pipeline": (
        "schedule",
        "--ranks --microbatches --stages-per-rank --forward --input-grad --weight-grad --transfer --beside --png "
        "--trace --json",
    ),
    "checkpoint ls": ("path", "--json"),
    "checkpoint show": ("path", "--tensors --json"),
    "checkpoint verify": ("path", "--json"),
    "checkpoint diff": ("a b", "--json"),
    "checkpoint prune": ("path", "--keep-last --keep-every --keep-best --dry-run --json"),
    "explain": ("logs", "--json"),
    "export": ("checkpoint folder", "--dtype --model"),
}


def parser_of(command: str) -> argparse.ArgumentParser:
    name, _, action = command.partition(" ")
    parser = argparse.ArgumentParser()
    importlib.import_module(COMMANDS[name][0]).add_arguments(parser)
    if action:
        (actions,) = (found for found in parser._actions if isinstance(found, argparse._SubParsersAction))
        parser = actions.choices[action]
    return parser


@pytest.mark.parametrize("command", ARGUMENTS)
def test_a_command_has_its_arguments(command: str) -> None:
    positional, options = (text.split() for text in ARGUMENTS[command])
    parser = parser_of(command)
    assert [action.dest for action in parser._actions if not action.option_strings] == positional
    assert set(options) <= {option for action in parser._actions for option in action.option_strings}


@pytest.mark.parametrize(
    "module",
    [f"meshtrain.{name}" for name in listed("train doctor operate.doctor cli cli.main config.docs")],
)
def test_a_module_can_be_run(module: str) -> None:
    assert importlib.util.find_spec(module) is not None
    if module != "meshtrain.config.docs":  # which writes its files and takes no arguments
        found = run([sys.executable, "-m", module, "--help"]).check()
        assert "usage: " in found.out


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["--version"], 0),
        (["plan", "configs/quickstart.yaml", "--hosts", "2"], 0),
        (["plan", "configs/quickstart.yaml", "--hosts", "2", "train.stepps=1"], 2),
        (["plan", "configs/none.yaml", "--hosts", "2"], 2),
        (["plam"], 2),
        (["explain", "no-such.log"], 2),
        (["explain", "tests/explain/logs/clean.log"], 0),
        (["explain", "tests/explain/logs/killed.log"], 1),
        (["launch", "configs/quickstart.yaml", "--slurm", "--nodes", "0", "--dry-run"], 2),
        (["pipeline", "1f1b", "--ranks", "2", "--microbatches", "4"], 0),
        (["pipeline", "2f2b", "--ranks", "2", "--microbatches", "4"], 2),
        (["checkpoint", "ls", "no-such-folder"], 2),
        (["export", "no-such-folder", "out"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_exit_statuses(arguments: list[str], status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert main(arguments) == status


def test_exit_statuses_of_a_training(short_run: tuple[Path, Finished], tmp_path: Path) -> None:
    """0 done, 2 the user's input is wrong, 75 stopped on request with a checkpoint."""
    arguments = ["-m", "meshtrain.train", "configs/quickstart.yaml", *TINY, f"train.output={tmp_path / 'run'}"]
    assert forked(1, *arguments, "train.stepps=1").status == 2
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "STOP").touch()
    assert run([sys.executable, *arguments, "train.steps=5"]).status == 75
    ended = json.loads((tmp_path / "run" / "exit.json").read_text())
    assert (ended["status"], ended["code"]) == ("stopped", 75)
    assert not (tmp_path / "run" / "STOP").exists()
