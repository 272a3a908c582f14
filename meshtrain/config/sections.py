"""The sections of a config as dataclasses: each key once, with its type, its default, its limits and what it means."""

from dataclasses import dataclass, field
from typing import Any, Literal

from meshtrain.config.durations import seconds
from meshtrain.config.faults import Fault
from meshtrain.config.rules import SOURCES
from meshtrain.config.values import key
from meshtrain.pipeline.schedule import NAMES as NAMES_OF_SCHEDULES


@dataclass(frozen=True)
class ModelSection:
    """Which model, and its sizes. The other keys of the section are those of the model's own `Config`."""

    name: str = key("llama", "One of meshtrain's models, or the path of a `.py` file of your own.", path=True)
    preset: str | None = key(None, "A named size of the model. The keys given beside it override it.")
    weights: str | None = key(
        None,
        "A Hugging Face directory or a checkpoint to start from. Its config gives the keys that are not given here.",
        path=True,
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
        path=True,
        names=tuple(SOURCES),
        suffix=".py",
        also=("dataset", "name", "type"),
    )
    path: str | None = key(
        None,
        "What the source reads: " + "; ".join(f"for `{name}` {what}" for name, what in SOURCES.items() if what) + ".",
        path=True,
        also=("data_path", "file", "dataset_path", "dir", "root"),
    )
    validation: float | str = key(
        0.02,
        "What is held out to measure the model: a share of the documents or samples, the path of another set, or 0 for "
        "nothing.",
        path=True,
        minimum=0,
        below=1,
        also=("val", "valid", "split", "validation_split"),
    )
    tokenizer: str = key(
        "bytes",
        "`bytes`, or the path of a Hugging Face `tokenizer.json`.",
        names=("bytes",),
        suffix=".json",
        path=True,
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
    prefetch: int = key(
        2,
        "Microbatches that each worker reads ahead; all workers together at least those of the next step.",
        minimum=1,
        also=("prefetch_factor",),
    )
    pin_memory: bool = key(True, "Whether batches are read into pinned memory, from which GPUs copy faster.")
    cache: str | None = key(
        None,
        "The folder of prepared token files. null: `meshtrain` in the user's cache folder.",
        path=True,
        also=("cache_dir",),
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

    sequence_parallel: bool | None = key(
        None,
        "With `tp`: whether activations between the parallel layers are split along the sequence. null: if the model's "
        "`tp_plan` has an `embedding_rowwise` layer, which is what splits it.",
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
    verify: bool = key(
        True,
        "With `tp`: whether the split model is compared with the plain one, on a short sample, before the first step.",
    )


@dataclass(frozen=True)
class Pipeline:
    """With `pp`: how the blocks of the model form stages, and in which order a rank works on its stages."""

    schedule: str = key(
        "1f1b",
        "The schedule by name, or the path of a `.csv` file.",
        path=True,
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
        path=True,
        also=("output_dir", "out_dir", "save_dir", "out"),
    )
    export: str | None = key(
        None,
        "A folder into which the weights are written at the end, as Hugging Face's transformers reads them: a new one, "
        "or that of an earlier export.",
        path=True,
        also=("export_dir", "save_model", "export_path"),
    )
    eval_every: int | Literal["epoch"] = key(
        50, "Steps between evaluations, `epoch` for the end of each epoch, or 0 for never.", minimum=0,
        also=("eval_interval", "eval_steps"),
    )  # fmt: skip
    eval_samples: int | None = key(
        None,
        "At most so many of the held-out samples make an evaluation, the same in every one and on every layout. null: "
        "2,048 samples of tokens, all images.",
        minimum=1,
        also=("eval_iters", "eval_batches", "max_eval_samples", "limit_val_batches"),
    )
    on_nonfinite: Literal["stop", "skip"] = key(
        "stop", "What happens to a step whose loss or gradient is not finite: the run stops, or the update is skipped."
    )
    time_limit: str | float | None = key(
        None,
        "How long a job of this run may take, from the start of its processes: `3h50m`, `90s`, `2d`, or a number of "
        "seconds. It saves a checkpoint and stops before that. null: no limit, but the end of a SLURM job is one.",
        above=0,
        also=("max_time", "walltime", "timeout", "exit_duration_in_mins", "max_duration"),
    )
    start_timeout_s: float = key(600.0, "Seconds that ranks wait for each other while the job starts.", above=0)
    step_timeout_s: float | None = key(
        None, "Seconds that ranks wait for each other in a step. null: chosen from measured steps.", above=0
    )
    sample_tokens: int = key(200, "Tokens of the text that a language model writes at the end; 0 for none.", minimum=0)
    chaos: tuple[Fault, ...] = key(
        (),
        "Faults planted on purpose, to rehearse what happens then; the keys of each are below. They strike in the "
        "first start of a job, and not when its launcher starts it anew.",
        also=("faults", "fault_injection"),
    )

    @property
    def time_limit_s(self) -> float | None:
        """`time_limit` in seconds."""
        return None if self.time_limit is None else seconds(self.time_limit)


@dataclass(frozen=True)
class Checkpoint:
    """When the state of a run is saved, which of these are kept, and with which a run begins."""

    every: int | Literal["epoch"] = key(
        100,
        "Steps between checkpoints, `epoch` for the end of each epoch, or 0 for the end of the run alone. A run that "
        "is asked to stop saves one too.",
        minimum=0,
        also=("save_steps", "save_interval", "save_every", "save_freq", "interval", "checkpoint_every"),
    )
    keep_last: int = key(
        3, "How many of the newest are kept.", minimum=1, also=("save_total_limit", "keep_latest_k", "max_to_keep")
    )
    keep_every: int | None = key(
        None, "Those of every so many steps are kept for good. null: none.", minimum=1, also=("keep_period",)
    )
    keep_best: bool = key(
        False,
        "Whether the one with the best evaluation is kept: the lowest loss, or of a classifier the highest accuracy. "
        "Of evaluations of different numbers of samples the best of each.",
        also=("save_best", "save_best_only", "load_best_model_at_end"),
    )
    resume: str = key(
        "latest",
        "What a run goes on from: `latest` is the newest of its own that is whole (none: it begins at the first step), "
        "`none` wants a fresh folder, and anything else is the path of a checkpoint, or of another run's folder.",
        path=True,
        also=("resume_from_checkpoint", "resume_from", "auto_resume", "load", "load_checkpoint"),
    )
    path: str | None = key(
        None,
        "The folder of the checkpoints, which all hosts have to see. null: `checkpoints` in the run's folder.",
        path=True,
        also=("dir", "folder", "checkpoint_dir", "save_dir", "dump_folder"),
    )
    in_background: bool = key(
        True,
        "Whether training goes on while a checkpoint is written. It then waits for a copy in memory only.",
        also=("async", "async_save", "async_mode"),
    )
    on_failure: Literal["continue", "stop"] = key(
        "continue", "What the run does when a checkpoint could not be written: it goes on and says so, or it stops."
    )
    timeout_s: float = key(
        1800.0,
        "Seconds after which a save is given up, and training goes on: a file system that fails over takes minutes. A "
        "rank that is lost meanwhile is noticed as ever.",
        minimum=900,
        also=("save_timeout", "async_save_timeout"),
    )
    allow_other_data: bool = key(
        False, "Whether a run may go on with other data than those of its checkpoint.", also=("ignore_data",)
    )


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
    "checkpoint": Checkpoint,
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
    "checkpoint",
    "metrics",
)  # in the order they are written
