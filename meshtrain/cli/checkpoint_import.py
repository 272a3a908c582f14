"""`meshtrain checkpoint import DCP_FOLDER RUN_FOLDER --config CONFIG`: a checkpoint of
torch.distributed.checkpoint becomes one from which a run goes on, on any layout.

One process reads it a block of rows at a time, so memory does not grow with the model. The files
that it writes are those that a run writes: weights, AdamW's moments and the number of updates, bit
for bit. Everything else follows from the config: the samples of the next steps and the learning
rate.
"""

import argparse
import json
import math
import shlex
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from meshtrain.checkpoint import directory
from meshtrain.checkpoint.dcp.folder import DcpFolder
from meshtrain.checkpoint.dcp.load import Loaded, Wanted, load
from meshtrain.checkpoint.dcp.names import NAMINGS, Heads, Naming
from meshtrain.checkpoint.dcp.options import Options
from meshtrain.checkpoint.directory import CHECKPOINTS
from meshtrain.checkpoint.folder_lock import lock_folder
from meshtrain.checkpoint.manifest import File, Manifest, file_of
from meshtrain.checkpoint.placement import Placement, part_to_write
from meshtrain.checkpoint.run_spec import RunSpec
from meshtrain.checkpoint.shard_file import BLOCK, write_shard
from meshtrain.config import Config, spec_of
from meshtrain.errors import InputError, bytes_text
from meshtrain.huggingface.load import KINDS, named_tensors
from meshtrain.huggingface.safetensors import FILE_BYTES, Entry
from meshtrain.job.environment import read_environment
from meshtrain.job.process import Job
from meshtrain.layout import Layout
from meshtrain.optim.groups import group_options, state_specs
from meshtrain.parallel.mixed_precision import cast, master_dtype
from meshtrain.parallel.sharding import Part, tensor_spec
from meshtrain.run.checkpointing import RNG
from meshtrain.run.setup import load_data, specify
from meshtrain.run.step_logger import first_counters

ROWS = 64 * 2**20  # bytes that are read at a time, unless a row has more


def run(arguments: argparse.Namespace) -> int:
    """Raises InputError: the folder, the config or the run's folder does not fit; nothing is
    written then."""
    name, *overrides = arguments.config
    import_checkpoint(
        arguments.dcp_folder,
        arguments.run_folder,
        name,
        overrides,
        naming=None if arguments.names is None else NAMINGS[arguments.names],
        step=arguments.step,
    )
    return 0


def import_checkpoint(
    dcp_folder: Path,
    run_folder: Path,
    config_name: str,
    overrides: list[str],
    *,
    naming: Naming | None = None,
    step: int | None = None,
    file_bytes: int = FILE_BYTES,
) -> Path:
    """Writes the checkpoint, and returns its folder.

    Args:
        naming: whose names the tensors have; None: the model's own.
        step: the number of steps done; None: as the folder says.
        file_bytes: about how many bytes a file has.

    Raises InputError, as `run`; DamagedError: a file of the folder is damaged.
    """
    output = f"train.output={json.dumps(str(run_folder))}"
    config = Config.load(config_name, [*overrides, output], for_training=True)
    with DcpFolder(dcp_folder) as folder:
        heads = None if naming is None else _heads(config, naming)
        loaded = load(folder, wanted_tensors(config), naming=naming, heads=heads, step=step)
        for note in loaded.notes:
            print(note)
        spec = _spec(config, run_folder)
        _require_room_for(spec, loaded.step)
        with lock_folder(run_folder), lock_folder(spec.checkpoints):
            checkpoint = write_checkpoint(loaded, spec, file_bytes)
    words = [config_name, *overrides, f"train.output={run_folder}"]
    command = f"python -m meshtrain.train {shlex.join(words)}"
    print(
        f"{checkpoint}: step {loaded.step}, the samples of step {loaded.step + 1} come next\n"
        f"go on with: {command}"
    )
    return checkpoint


def wanted_tensors(config: Config) -> list[Wanted]:
    """The tensors of a config's model, and AdamW's state of them, as its run saves them."""
    model = cast(spec_of(config).copy(), master_dtype(config.train.precision))
    optimizer = config.optimizer
    wanted = []
    for names, tensor in named_tensors(model).items():
        spec = tensor_spec(names[0], tensor)
        placement = Placement(spec.shape, KINDS[tensor.dtype])
        if not isinstance(tensor, torch.nn.Parameter) or not tensor.requires_grad:
            wanted.append(Wanted(names, placement, {}))
            continue
        states = {}
        for kind, state in state_specs(optimizer, spec).items():
            states[kind] = Placement(state.shape, KINDS[state.dtype or tensor.dtype])
        group = group_options(optimizer, spec)
        options = Options.of(group, optimizer.lr, optimizer.betas, optimizer.eps)
        wanted.append(Wanted(names, placement, states, group.name, options))
    return wanted


def _heads(config: Config, naming: Naming) -> Heads:
    """The heads of the model. Raises InputError: the names are another model's."""
    if config.model.name != naming.model:
        raise InputError(
            f"--as names {naming.title}, which is model.name: {naming.model} here, and the "
            f"config's model is {config.model.name}"
        )
    return Heads.of(config.model.keys)


def _spec(config: Config, run_folder: Path) -> RunSpec:
    """What the run is compared with when it goes on: its data are opened as it does."""
    job = Job(read_environment({}), torch.device("cpu"), None)
    job.layout = Layout({})
    data = load_data(config, job)
    checkpoints = run_folder / CHECKPOINTS
    if config.checkpoint.path is not None:
        checkpoints = Path(config.checkpoint.path).expanduser()
    return specify(config, job, data, run_folder, checkpoints)


def _require_room_for(spec: RunSpec, step: int) -> None:
    """Raises InputError: the run would not go on from a checkpoint of this step."""
    if step > spec.steps:
        raise InputError(
            f"the checkpoint is of step {step}, and the run ends at step {spec.steps}: give it "
            "more steps (train.steps), or say with --step how many are done"
        )
    steps = directory.complete_steps(spec.checkpoints)
    if steps:
        raise InputError(
            f"{spec.checkpoints} holds checkpoints already, the last of step {steps[-1]}: name "
            "another folder for the run"
        )


# Writing ------------------------------------------------------------------------------------------


def write_checkpoint(loaded: Loaded, spec: RunSpec, file_bytes: int) -> Path:
    """Writes the state as the checkpoint of its step, in as many files as if so many ranks had."""
    config, step = spec.config, loaded.step
    entries = [Entry(name, one.dtype, one.shape) for name, one in loaded.placements.items()]
    total = sum(entry.nbytes for entry in entries)
    # Each rank has all tensors, so each writes an equal share of their rows.
    layout = Layout({"dp_shard": max(1, math.ceil(total / file_bytes))})
    manifest = Manifest(
        step=step,
        layout=layout,
        tensors=loaded.placements,
        files={},
        written=datetime.now(UTC).isoformat(timespec="seconds"),
        samples=config.batch.sizes.before(step),
        tokens=0,
        config=json.loads(json.dumps(config.plain())),
        data=spec.data,
        versions=spec.versions,
        rng={"seed": config.train.seed, "rule": RNG},
        counters=first_counters(spec.steps),
        evaluation=None,
    )
    print(f"writes {bytes_text(total)}")
    unfinished = directory.begin(spec.checkpoints, step)
    try:
        files = {}
        for rank in range(layout.world_size):
            files[file_of(rank)] = _write_file(unfinished / file_of(rank), manifest, rank, loaded)
        text = replace(manifest, files=files).to_json()
        return directory.finish(spec.checkpoints, step, text)
    finally:
        directory.abandon(spec.checkpoints, step)


def _write_file(path: Path, manifest: Manifest, rank: int, loaded: Loaded) -> File:
    rows = []
    for name, entry in manifest.entries(rank).items():
        part = part_to_write(manifest.tensors[name], manifest.layout, rank)
        assert part is not None, name  # else it had no entry
        rows.append((entry, _blocks(loaded, name, part, entry)))
    return write_shard(path, rows)


def _blocks(loaded: Loaded, name: str, part: Part, entry: Entry) -> Iterator[memoryview]:
    """The bytes of a part of a tensor, in the blocks of a file."""
    rows, *columns = part
    step = max(1, ROWS // max(1, entry.nbytes // entry.shape[0]))
    rest = b""
    for first in range(rows.start, rows.stop, step):
        values = loaded.read(name, (slice(first, min(first + step, rows.stop)), *columns))
        data = values.contiguous().view(-1).view(torch.uint8).numpy().data
        if rest:
            data = memoryview(rest + data)
        whole = len(data) // BLOCK * BLOCK
        for begin in range(0, whole, BLOCK):
            yield data[begin : begin + BLOCK]
        rest = bytes(data[whole:])
    if rest:
        yield memoryview(rest)
