"""The YAML of a run: its sections as dataclasses, and how it is read.

The dataclasses below are the schema. Each key stands once, with its type, default, limits and documentation; from them
come the checks, docs/configuration.md and configs/schema.json (`python -m meshtrain.config.docs` writes both).

    config = Config.load("configs/quickstart.yaml", ["train.steps=50", "layout.tp=2"])

reads the file, lays the overrides over it and checks everything. Whatever is wrong is raised once, as `ConfigErrors`:
each error with file and line, and a way out. The rooms behind it: `config.nodes` (text to nodes that know their line),
`config.values` (nodes to values), `config.rules` and `config.model` (what values must keep to together).
"""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from meshtrain import locate
from meshtrain.config.errors import ConfigError, ConfigErrors, nearest, written
from meshtrain.config.model import read_model
from meshtrain.config.nodes import Node, apply_overrides, read_file, write
from meshtrain.config.rules import SOURCES, Draft, check_device, check_files, check_layout, check_rules, read_layout
from meshtrain.config.stages import check_stages
from meshtrain.config.tensor import check_split
from meshtrain.config.values import key, keys_of, read_section
from meshtrain.errors import InputError
from meshtrain.layout import AXES
from meshtrain.pipeline.schedule import NAMES as NAMES_OF_SCHEDULES

__all__ = [
    "Batch",
    "Config",
    "ConfigError",
    "ConfigErrors",
    "Data",
    "Metrics",
    "ModelSection",
    "Optimizer",
    "Parallel",
    "Pipeline",
    "Train",
]


@dataclass(frozen=True)
class ModelSection:
    """Which model, and its sizes. The other keys of the section are those of the model's own `Config`."""

    name: str = key("llama", "One of meshtrain's models, or the path of a `.py` file of your own.")
    preset: str | None = key(None, "A named size of the model. The keys given beside it override it.")
    weights: str | None = key(
        None,
        "A Hugging Face directory to start from. Its `config.json` gives the keys that are not given here.",
        also=("pretrained", "pretrained_model_name_or_path", "model_name_or_path", "checkpoint", "init_from"),
    )
    keys: dict[str, Any] = field(default_factory=dict)  # of the model's Config: given, of preset or weights, or default


@dataclass(frozen=True)
class Data:
    """What the model learns from."""

    source: str = key(
        "python-stdlib",
        "Where samples come from, or the path of a `.py` file of your own. `python-stdlib` is the text of the running "
        "Python's own library, which every machine has.",
        names=tuple(SOURCES),
        suffix=".py",
        also=("dataset", "name", "type"),
    )
    path: str | None = key(
        None,
        "What the source reads: " + "; ".join(f"for `{name}` {what}" for name, what in SOURCES.items() if what) + ".",
        also=("data_path", "file", "dataset_path", "dir", "root"),
    )
    validation: float | str = key(
        0.02,
        "What is held out to measure the model: a share of the documents or samples, the path of another set, or 0 for "
        "nothing.",
        minimum=0,
        below=1,
        also=("val", "valid", "split", "validation_split"),
    )
    tokenizer: str = key(
        "bytes", "`bytes`, or the path of a Hugging Face `tokenizer.json`.", names=("bytes",), suffix=".json"
    )
    seq_len: int = key(
        256,
        "Tokens of a sample.",
        minimum=1,
        also=("sequence_length", "seq_length", "context_length", "block_size", "max_seq_len"),
    )
    mask_documents: bool = key(False, "Whether attention stays inside of a document where several share a sample.")
    augment: bool = key(False, "Whether training images are shifted and mirrored at random.", also=("augmentation",))
    image_size: int | None = key(
        None,
        "Height and width, in pixels, to which images are resized. null: as they are (`images` needs it).",
        minimum=1,
    )
    workers: int = key(
        2, "Processes per rank that read ahead. 0 reads in the training process.", minimum=0, also=("num_workers",)
    )
    prefetch: int = key(2, "Microbatches that each worker reads ahead.", minimum=1, also=("prefetch_factor",))
    pin_memory: bool = key(True, "Whether batches are read into pinned memory, from which GPUs copy faster.")
    cache: str | None = key(
        None, "The folder of prepared token files. null: `meshtrain` in the user's cache folder.", also=("cache_dir",)
    )


@dataclass(frozen=True)
class Batch:
    """How many samples make a step, and how many go through the model at once."""

    global_size: int = key(
        doc="Samples of a step, over all ranks, whatever the layout.",
        minimum=1,
        also=("batch_size", "global_batch_size", "train_batch_size", "size"),
    )
    micro_size: int = key(
        doc="Samples of one forward on one rank. The number of forwards per step follows from it.",
        minimum=1,
        also=("micro_batch_size", "per_device_train_batch_size", "local_batch_size"),
    )


@dataclass(frozen=True)
class Parallel:
    """How the model is held and run on a rank. None of it changes what is computed."""

    sequence_parallel: bool = key(
        True,
        "With `tp`: whether activations between the parallel layers are split along the sequence.",
        also=("sequence_parallelism", "sp"),
    )
    regather: bool = key(
        False, "With `tp`: whether a layer's input is gathered again in backward instead of kept.", also=()
    )
    symmetric_memory: bool = key(
        False,
        "With `tp` on GPUs that reach each other's memory: whether products and the communication beside them run as "
        "one kernel.",
        also=("async_tp", "async_tensor_parallel"),
    )
    recompute: Literal["none", "selective", "full"] = key(
        "none",
        "What is computed again in backward instead of kept: `full` the inside of every block, `selective` all but its "
        "expensive products.",
        also=("activation_checkpointing", "gradient_checkpointing", "checkpoint_activations"),
    )
    compile: bool = key(False, "Whether each block is compiled with `torch.compile`.", also=("torch_compile",))
    reshard_after_forward: bool = key(
        True, "FSDP: whether a block's gathered weights are let go after forward and gathered again in backward."
    )


@dataclass(frozen=True)
class Pipeline:
    """With `pp`: how the blocks of the model form stages, and in which order a rank works on its stages."""

    schedule: str = key(
        "1f1b",
        "The schedule by name, or the path of a `.csv` file.",
        also=("pipeline_schedule", "pp_schedule", "pipeline_parallel_schedule"),
        names=NAMES_OF_SCHEDULES,
        suffix=".csv",
    )
    stages_per_rank: int | None = key(
        None,
        "Stages that a rank holds. null: what the schedule needs, 2 for those that interleave.",
        minimum=1,
        also=("virtual_stages", "num_virtual_stages", "virtual_pipeline_size"),
    )
    split: tuple[int, ...] | None = key(
        None, "Blocks of each stage, first to last. null: balanced by what the blocks cost.", minimum=1
    )


@dataclass(frozen=True)
class Optimizer:
    """The optimizer, and the learning rate over the run."""

    name: Literal["adamw"] = key("adamw", "The optimizer.", also=("type", "optimizer"))
    lr: float = key(3e-4, "The highest learning rate.", above=0, also=("learning_rate", "max_lr"))
    min_lr: float = key(0.0, "The learning rate at the end of the run.", minimum=0, also=("lr_min", "final_lr"))
    betas: tuple[float, float] = key(
        (0.9, 0.95),
        "AdamW's two decay rates of its averages.",
        minimum=0,
        below=1,
        also=("beta1", "beta2", "adam_beta1"),
    )
    eps: float = key(1e-8, "AdamW's term in the denominator.", above=0, also=("epsilon", "adam_eps"))
    weight_decay: float = key(0.1, "Decay of the weights with two or more dims; the others do not decay.", minimum=0)
    clip_norm: float | None = key(
        1.0,
        "The norm of all gradients together to which they are clipped. null: they are not.",
        above=0,
        also=("grad_clip", "max_grad_norm", "clip_grad", "gradient_clipping", "max_norm"),
    )
    schedule: Literal["cosine", "linear", "wsd", "constant"] = key(
        "cosine",
        "The course of the learning rate after the warm-up. `wsd` stays at `lr` and falls in the last `decay_steps`.",
        also=("lr_schedule", "scheduler", "lr_scheduler", "lr_scheduler_type"),
    )
    warmup_steps: int = key(
        20,
        "Update n of the warm-up has the rate `lr` * n / `warmup_steps`.",
        minimum=0,
        also=("warmup", "num_warmup_steps"),
    )
    decay_steps: int | None = key(
        None, "`wsd`: the length of the final decay. null: a tenth of the steps.", minimum=1, also=("lr_decay_iters",)
    )


@dataclass(frozen=True)
class Train:
    """The run: how long, in which numbers, and where it writes."""

    steps: int | None = key(
        None,
        "Updates of the run. Give this or `epochs`.",
        minimum=1,
        also=("max_steps", "num_steps", "iterations", "max_iters", "train_iters"),
    )
    epochs: int | None = key(
        None,
        "Passes over the training set. Give this or `steps`.",
        minimum=1,
        also=("num_epochs", "max_epochs", "num_train_epochs"),
    )
    seed: int = key(0, "Fixes the first weights and the order of the samples.", minimum=0, maximum=2**63 - 1)
    precision: Literal["float32", "bfloat16", "float16", "float64"] = key(
        "float32",
        "The numbers of forward and backward. `bfloat16` and `float16` keep float32 weights, and `float16` scales the "
        "loss; `float64` checks a layout without rounding.",
        also=("dtype", "torch_dtype", "mixed_precision", "bf16", "fp16"),
    )
    deterministic: bool = key(False, "Whether only kernels are used that give the same bits every time.")
    output: str = key(
        "runs/{name}",
        "The run's folder. `{name}` stands for the name of the config.",
        also=("output_dir", "out_dir", "save_dir", "out"),
    )
    export: str | None = key(
        None,
        "A folder into which the weights are written at the end, as Hugging Face's transformers reads them: a new one, "
        "or that of an earlier export.",
        also=("export_dir", "save_model", "export_path"),
    )
    eval_every: int | Literal["epoch"] = key(
        50, "Steps between evaluations, `epoch` for the end of each epoch, or 0 for never.", minimum=0,
        also=("eval_interval", "eval_steps"),
    )  # fmt: skip
    on_nonfinite: Literal["stop", "skip"] = key(
        "stop", "What happens to a step whose loss or gradient is not finite: the run stops, or the update is skipped."
    )
    start_timeout_s: float = key(600.0, "Seconds that ranks wait for each other while the job starts.", above=0)
    step_timeout_s: float | None = key(
        None, "Seconds that ranks wait for each other in a step. null: chosen from measured steps.", above=0
    )
    sample_tokens: int = key(200, "Tokens of the text that a language model writes at the end; 0 for none.", minimum=0)


@dataclass(frozen=True)
class Metrics:
    """What is written for people to watch, besides the progress line and `metrics.jsonl`."""

    tensorboard: bool = key(False, "Whether metrics are written for TensorBoard too.")
    profile: tuple[int, int] | None = key(
        None, "The first and the last step, counted from 1, that `torch.profiler` records.", minimum=1
    )
    timeline: int | None = key(
        None, "With `pp`: the step, counted from 1, whose measured timeline is written to `timeline.json`.", minimum=1
    )
    memory_snapshot: bool = key(False, "Whether a snapshot of the GPU's memory is written at the end.")


# The sections that are plain dataclasses; `model` has the keys of a model besides, and `layout` the axes of the mesh.
SECTIONS: dict[str, Any] = {
    "data": Data,
    "batch": Batch,
    "parallel": Parallel,
    "pipeline": Pipeline,
    "optimizer": Optimizer,
    "train": Train,
    "metrics": Metrics,
}
NAMES = (
    "model",
    "data",
    "layout",
    "batch",
    "parallel",
    "pipeline",
    "optimizer",
    "train",
    "metrics",
)  # in the order they are written


@dataclass(frozen=True)
class Config:
    """A run, checked and complete: what the file gives, what overrides it, and every default."""

    model: ModelSection
    data: Data
    layout: dict[str, int]  # axis -> size, outermost first, as written: one may be -1
    batch: Batch
    parallel: Parallel
    pipeline: Pipeline
    optimizer: Optimizer
    train: Train
    metrics: Metrics
    name: str = field(default="", compare=False)  # of the file, without its ending
    file: str = field(default="", compare=False)  # as errors name it
    overrides: tuple[str, ...] = field(default=(), compare=False)  # each with its origin, one line to print

    @classmethod
    def load(
        cls,
        name: str,
        overrides: Sequence[str] = (),
        *,
        world_size: int | None = None,
        for_training: bool = False,
        device: str | None = None,
    ) -> "Config":
        """Reads a config file and lays overrides over it.

        Args:
            name: the path of a YAML file, or the name of one of meshtrain's own.
            overrides: `section.key=value`, each value YAML; the last one for a key wins.
            world_size: the number of processes, which the layout has to make; None where that is not known yet.
            for_training: also refuses what cannot be trained now: files that are missing, axes that are not built.
            device: what the processes compute on, "cpu" or "cuda"; None where that is not known yet.

        Raises:
            InputError: there is no such file.
            ConfigErrors: everything that is wrong with the config.
        """
        try:
            path = locate.config_path(name)
            shown = _shown(path)
            errors: list[ConfigError] = []
            root = read_file(path, shown, errors)
        except OSError as error:
            raise InputError(str(error)) from error
        if root is None:
            raise ConfigErrors(shown, errors)
        applied = apply_overrides(root, overrides, errors)
        draft = _read(root, errors)
        own = keys_of(ModelSection)
        model_keys = [path[6:] for path in draft.values if path.startswith("model.") and path[6:] not in own]
        layout = read_layout(draft)
        if layout is not None:
            check_layout(draft, layout, world_size, for_training)
            check_split(draft, layout, world_size, model_keys)
            check_stages(draft, layout, world_size, model_keys)
            check_device(draft, layout, world_size, device)
        check_rules(draft)
        if for_training:
            check_files(draft)
        if errors or layout is None:
            raise ConfigErrors(shown, errors)
        return _made(draft, layout, path.stem, shown, tuple(map(str, applied)))

    def to_yaml(self) -> str:
        """The whole config as YAML, overrides and defaults included: read again, it gives an equal Config."""
        origin = {"preset": self.model.preset, "weights": self.model.weights}
        model = {"name": self.model.name, **{key: name for key, name in origin.items() if name}, **self.model.keys}
        plain = {"model": model, "data": asdict(self.data), "layout": self.layout}
        plain |= {section: asdict(getattr(self, section)) for section in NAMES if section not in plain}
        head = [f"The resolved config of a run, from {self.file or 'Python'}: overrides and every default included."]
        head += self.overrides
        return "".join(f"# {' '.join(line.split())}\n" for line in head) + write(plain)


def _read(root: Node, errors: list[ConfigError]) -> Draft:
    """Every section but the layout, value by value."""
    sections = {section: keys_of(cls) for section, cls in SECTIONS.items()}
    elsewhere = {axis: f"layout.{axis}" for axis in AXES}
    declared = [(section, one) for section, keys in sections.items() for one in keys.values()]
    for section, one in declared:
        elsewhere.setdefault(one.name, f"{section}.{one.name}")
    for section, one in declared:
        elsewhere |= {other: f"{section}.{one.name}" for other in one.also if other not in elsewhere}
    draft = Draft(root, errors, elsewhere)
    for section, node in root.value.items():
        if section not in NAMES:
            errors.append(ConfigError(node.key_at, _unknown_section(section, elsewhere)))
    own = keys_of(ModelSection)
    del own["keys"]
    read_model(draft, own)
    for section, keys in sections.items():
        node = root.value.get(section) or Node({}, root.at, root.at)
        values = read_section(node, section, keys, elsewhere, errors)
        draft.values |= {f"{section}.{one}": value for one, value in values.items()}
    return draft


def _unknown_section(section: str, elsewhere: dict[str, str]) -> str:
    meant = nearest(section, NAMES) or elsewhere.get(section)
    if ":" in section:
        return f"there is no section {written(section)}: a colon needs a space after it"
    return f"there is no section {written(section)}: " + (
        f"did you mean {meant}?" if meant else f"the sections are {', '.join(NAMES)}"
    )


def _made(draft: Draft, layout: dict[str, int], name: str, file: str, overrides: tuple[str, ...]) -> Config:
    def values(section: str) -> dict[str, Any]:
        start = f"{section}."
        return {path.removeprefix(start): value for path, value in draft.values.items() if path.startswith(start)}

    model = values("model")
    train = values("train")
    train["output"] = train["output"].replace("{name}", name)
    return Config(
        model=ModelSection(model.pop("name"), model.pop("preset"), model.pop("weights"), model),
        data=Data(**values("data")),
        layout=layout,
        batch=Batch(**values("batch")),
        parallel=Parallel(**values("parallel")),
        pipeline=Pipeline(**values("pipeline")),
        optimizer=Optimizer(**values("optimizer")),
        train=Train(**train),
        metrics=Metrics(**values("metrics")),
        name=name,
        file=file,
        overrides=overrides,
    )


def _shown(path: Path) -> str:
    """A path as errors name it: relative where the file lies under the working directory."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
