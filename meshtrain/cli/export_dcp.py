"""`meshtrain export CHECKPOINT DIR --format dcp`: the state of a checkpoint as a folder that
torch.distributed.checkpoint loads, into any processes.

Weights, AdamW's moments and the number of updates have the bits of the checkpoint. The learning
rate and the other options of AdamW are those of the next update, as in a loop of torch's after
`scheduler.step()`.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from meshtrain.checkpoint.dcp.names import Heads, Naming
from meshtrain.checkpoint.dcp.options import Options
from meshtrain.checkpoint.dcp.save import FILE_BYTES, left_out, state_of, write_folder
from meshtrain.checkpoint.directory import open_manifest, require_checkpoint
from meshtrain.checkpoint.manifest import Manifest
from meshtrain.checkpoint.shard_file import ShardReader
from meshtrain.checkpoint.state import UPDATES
from meshtrain.checkpoint.weights import read_part
from meshtrain.config.schema import OptimizerSection, ParamGroupSection
from meshtrain.errors import InputError, bytes_text, join_some
from meshtrain.huggingface.export import ExportFolder, as_input_errors
from meshtrain.optim.groups import group_options
from meshtrain.optim.lr_schedule import learning_rate
from meshtrain.parallel.sharding import ParameterSpec


def export_dcp(
    checkpoint: str | Path,
    folder: str | Path,
    *,
    naming: Naming | None = None,
    say: Callable[[str], None] = lambda line: None,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Writes the folder.

    Args:
        checkpoint: a checkpoint, or a run's folder.
        folder: a new or an empty one.
        naming: whose names the tensors get; None: the model's own.
        say: prints what was written, and what was not.
        file_bytes: the maximum size of one file, unless a row of a tensor is larger; as much is
            in memory.

    Raises:
        DamagedError: the checkpoint is not as it was written; names file and tensor. InputError:
            something else is wrong with it, or with the folder. No partial export is left.
    """
    path = require_checkpoint(checkpoint)
    manifest, _ = open_manifest(path)
    heads = None
    if naming is not None:
        name = manifest.section("model").get("name")
        if name != naming.model:
            raise InputError(
                f"--as names {naming.title}, which is model.name: {naming.model} here, and the "
                f"checkpoint's model is {name!a:.80}"
            )
        heads = Heads.of(manifest.section("model"))
    optimizer, lr_share = _optimizer(manifest)
    place = ExportFolder(folder)
    if place.target.resolve().is_relative_to(path.resolve()):
        raise InputError(
            f"{folder} is inside of the checkpoint {path}: name a folder somewhere else"
        )

    def options(name: str, shape: tuple[int, ...]) -> Options:
        group = group_options(optimizer, ParameterSpec(name, shape))
        return Options.of(group, optimizer.lr, optimizer.betas, optimizer.eps)

    with ShardReader(path, manifest) as files, as_input_errors(place.target):
        state = state_of(
            manifest,
            _names(manifest),
            options,
            lr_share=lr_share,
            updates=read_part(files, UPDATES, (slice(0, 1),)).item(),
            naming=naming,
            heads=heads,
        )
        place.make()
        try:
            write_folder(place.making, state, files, file_bytes)
            place.finish({}, {})
        finally:
            place.drop()
    others = left_out(manifest)
    if others:
        say(f"left out: {join_some(others)}")
    say(
        f"state of step {manifest.step} in {folder}: {len(state.tensors)} tensors, "
        f"{bytes_text(manifest.total_bytes)}"
    )


def _names(manifest: Manifest) -> dict[str, Sequence[str]]:
    """Of tensors that the model ties: the first name -> all of them."""
    model = manifest.section("model")
    first, head = "model.embed_tokens.weight", "lm_head.weight"
    is_tied = model.get("tie_word_embeddings") is True and f"model.{first}" in manifest.tensors
    return {first: (first, head)} if is_tied else {}


def _optimizer(manifest: Manifest) -> tuple[OptimizerSection, float]:
    """The optimizer of the run, and the learning rate of the next update, as a share of the highest
    one. Raises InputError: its section in the checkpoint is none."""
    section = manifest.section("optimizer")
    known = {key: section[key] for key in OptimizerSection.__dataclass_fields__ if key in section}
    try:
        known["groups"] = tuple(ParamGroupSection(**group) for group in known.get("groups", ()))
        optimizer = OptimizerSection(**known)
        step = manifest.step + 1
        lr = learning_rate(optimizer, step, max(step, manifest.counters.get("steps", 0)))
        return optimizer, lr / optimizer.lr
    except (TypeError, ValueError, ArithmeticError) as error:
        raise InputError(
            f"the section optimizer of the checkpoint's config cannot be read: {error}"
        ) from error
