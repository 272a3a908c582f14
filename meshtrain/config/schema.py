"""The sections of a config as dataclasses: each key once, with its type, its default, its limits and what it means.

The text below a field is its documentation, from which docs/configuration.md and configs/schema.json are written.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from meshtrain.config.convert import key, seconds
from meshtrain.data.order import BatchSizes
from meshtrain.optim.registry import OPTIMIZERS
from meshtrain.pipeline.schedule import NAMES as NAMES_OF_SCHEDULES

if TYPE_CHECKING:
    OptimizerName = str
else:
    OptimizerName = Literal[tuple(OPTIMIZERS)]

SINKS = ("prometheus", "tensorboard", "wandb")  # those that metrics/sinks.py has
# data.source -> what data.path names, or None where there is nothing to name.
SOURCES: dict[str, str | None] = {
    "python-stdlib": None,
    "text": "a text file, or a folder of .txt and .md files",
    "jsonl": "a .jsonl file, plain or packed (.gz, .zst), or a folder of them",
    "parquet": "a .parquet file, or a folder of them",
    "tokens": "the folder of a token file",
    "megatron": "the prefix of a .bin and an .idx file",
    "digits": None,
    "mnist": "the folder of MNIST's idx files",
    "images": "a folder with one folder of images per class",
}


@dataclass(frozen=True)
class ModelSection:
    """Which model, and its sizes. The other keys of the section are those of the model's own `Config`."""

    name: str = key("llama", path=True)
    """One of meshtrain's models, or the path of a `.py` file of your own."""
    preset: str | None = None
    """A named size of the model. The keys given beside it override it."""
    weights: str | None = key(
        None, path=True, also="pretrained pretrained_model_name_or_path model_name_or_path checkpoint init_from"
    )
    """A Hugging Face directory or a checkpoint to start from. Its config gives the keys that are not given here."""
    keys: dict[str, Any] = field(default_factory=dict)  # of the model's Config: given, of preset or weights, or default


@dataclass(frozen=True)
class Source:
    """One source of a mixture. Their samples are mixed by exact shares: see [data](data.md#mixtures)."""

    name: str = key()
    """What it is called in metrics, and what its order of samples is drawn from."""
    path: str | None = key(None, path=True, also="data_path file dir")
    """As `data.path`."""
    weight: float | tuple[tuple[int, float], ...] = key(1.0, minimum=0, also="weights ratio share proportion")
    """Its share of the samples, in proportion to the weights of the others."""
    epochs: int | None = key(None, minimum=1, also="max_epochs repeat")
    """The most passes over it that a run may make: one that would make more is refused at its start."""
    source: str | None = key(None, names=tuple(SOURCES), also="type kind")
    """As `data.source`, which is the default: a source of text or tokens."""


@dataclass(frozen=True)
class Data:
    """What the model learns from."""

    source: str = key("python-stdlib", path=True, names=tuple(SOURCES), suffix=".py", also="dataset name type")
    """Where samples come from, or the path of a `.py` file of your own. `python-stdlib`: Python's own library."""
    path: str | None = key(
        None,
        doc="What the source reads: "
        + "; ".join(f"for `{name}` {description}" for name, description in SOURCES.items() if description)
        + ".",
        path=True,
        also="data_path file dataset_path dir root",
    )
    sources: tuple[Source, ...] = key((), also="mixture blend data_mixture datasets")
    """Several sources that are mixed, in the place of `path`; the keys of each are below."""
    validation: float | str = key(0.02, path=True, minimum=0, below=1, also="val valid split validation_split")
    """What is held out to measure the model: a share of the documents or samples, the path of another set, or 0."""
    tokenizer: str = key("bytes", names=("bytes",), suffix=".json", path=True)
    """`bytes`, or the path of a Hugging Face `tokenizer.json`."""
    text_field: str = key("text", also="text_key text_column content_field")
    """For `jsonl` and `parquet`: the field that is the text of a document."""
    seq_len: int = key(256, minimum=1, also="sequence_length seq_length context_length block_size max_seq_len")
    """Tokens of a sample."""
    seq_len_warmup: tuple[tuple[int, int], ...] = key((), minimum=1, also="sequence_length_warmup curriculum_learning")
    """Lengths to which samples are cut in the first steps, up to `seq_len`: `[[0, 64], [1000, 256]]`."""
    mask_documents: bool = False
    """Whether attention stays inside of a document where several share a sample. On GPUs in 16 bits the faster way."""
    augment: bool = key(False, also="augmentation")
    """Whether training images are shifted and mirrored at random."""
    image_size: int | None = key(None, minimum=1)
    """Height and width, in pixels, to which images are resized. null: as they are (`images` needs it)."""
    workers: int = key(2, minimum=0, also="num_workers")
    """Processes per rank that read ahead. 0 reads in the training process."""
    prefetch: int = key(2, minimum=1, also="prefetch_factor")
    """Microbatches that each worker reads ahead; all workers together at least those of the next step."""
    pin_memory: bool = True
    """Whether batches are read into pinned memory, from which GPUs copy faster."""
    cache: str | None = key(None, path=True, also="cache_dir")
    """The folder of prepared token files. null: `meshtrain` in the user's cache folder."""


@dataclass(frozen=True)
class Batch:
    """How many samples make a step, and how many go through the model at once."""

    global_size: int | tuple[tuple[int, int], ...] = key(
        minimum=1, also="batch_size global_batch_size train_batch_size size rampup_batch_size"
    )
    """Samples of a step, over all ranks. `[[0, 64], [2000, 256]]` is 64 in the first 2000 steps, and then 256."""
    micro_size: int = key(minimum=1, also="micro_batch_size per_device_train_batch_size local_batch_size")
    """Samples of one forward on one rank. The number of forwards per step follows from it."""

    @property
    def sizes(self) -> BatchSizes:
        """`global_size` of each step."""
        return BatchSizes.of(self.global_size)


@dataclass(frozen=True)
class Parallel:
    """How the model is held and run on a rank. None of it changes what is computed; `reduce_precision` rounds."""

    sequence_parallel: bool | None = key(None, also="sequence_parallelism sp")
    """With `tp`: whether activations between parallel layers are split along the sequence. null: if the model's
    `tp_plan` has an `embedding_rowwise` layer, which splits it."""
    regather: bool = False
    """With `tp`: whether a layer's input is gathered again in backward instead of kept."""
    symmetric_memory: bool | Literal["auto"] = key("auto", also="async_tp async_tensor_parallel")
    """With `tp` and `sequence_parallel` on GPUs: whether products and the communication beside them run as one kernel.
    `auto`: where NVLink joins all GPUs of `tp`. true also puts FSDP's messages into memory that NCCL has registered."""
    context: Literal["gather", "ring"] = key(
        "gather",
        also="cp_comm_type context_parallel_method cp_method",
        instead=("ulysses a2a all_to_all a2a+p2p", "with context_heads: 4 ranks swap heads, which is Ulysses"),
    )
    """With `cp`: how keys and values travel: `gather` brings all of them to every rank, with `ring` they go round."""
    context_heads: int = key(1, minimum=1, also="ulysses ulysses_size ulysses_degree sp_ulysses_degree")
    """With `cp`: so many neighbours split the heads of attention instead. As many as `cp` is DeepSpeed's Ulysses."""
    expert_parallel: int | None = key(
        None, minimum=1, also="ep ep_size expert_parallel_size expert_parallel_degree expert_model_parallel_size"
    )
    """Ranks of `tp`, `cp`, `dp_shard` and `dp_replicate`, the inner ones first, over which the experts of a layer are
    dealt out. null: as many as `tp`."""
    expert_rows: float | None = key(None, minimum=1, also="expert_buffer expert_buffer_size")
    """With experts that are dealt out: messages to experts get a fixed size, room for so many times the rows of even
    loads, and the host waits for the device at the end of a step only. No row is dropped: a step in which one finds no
    room is computed again. null: the true sizes, for which the host waits once per layer and forward."""
    recompute: Literal["none", "selective", "full"] = key(
        "none", also="activation_checkpointing gradient_checkpointing checkpoint_activations"
    )
    """What is computed again in backward: `full` the inside of every block, `selective` all but expensive products."""
    compile: bool | Literal["auto"] = key("auto", also="torch_compile")
    """Whether each block is compiled with `torch.compile`. `auto`: on GPUs, where Triton builds its kernels and the
    schedule computes whole backwards."""
    reshard_after_forward: bool = True
    """FSDP: whether a block's gathered weights are let go after forward and gathered again in backward."""
    shard_optimizer: bool = key(False, also="zero1 zero_1 zero_stage use_distributed_optimizer distributed_optimizer")
    """DDP: whether the copies of `dp_replicate` share the optimizer's work and states (ZeRO-1), as FSDP's shards do."""
    reduce_precision: Literal["float32", "bfloat16"] | None = key(None, also="reduce_dtype grad_reduce_dtype")
    """The numbers in which gradients are sent and summed over the data ranks. With `bfloat16` the rounding depends on
    the layout. null: as they are kept, in float32 or float64."""
    verify: bool = True
    """With `tp` or `cp`: whether the split model is compared with the plain one before the first step. With several
    data ranks, `cp` or `recompute`: whether a first forward that changes buffers of the model is refused."""


@dataclass(frozen=True)
class Pipeline:
    """With `pp`: how the blocks of the model form stages, and in which order a rank works on its stages."""

    schedule: str = key(
        "1f1b",
        path=True,
        names=NAMES_OF_SCHEDULES,
        suffix=".csv",
        also="pipeline_schedule pp_schedule pipeline_parallel_schedule",
    )
    """The schedule by name, or the path of a `.csv` file."""
    stages_per_rank: int | None = key(None, minimum=1, also="virtual_stages num_virtual_stages virtual_pipeline_size")
    """Stages that a rank holds. null: what the schedule needs, 2 for those that interleave."""
    split: tuple[int, ...] | None = key(None, minimum=1)
    """Blocks of each stage, first to last. null: balanced by what the blocks cost."""


@dataclass(frozen=True)
class ParamGroup:
    """Parameters with updates of their own. The first group whose pattern matches a name counts."""

    match: str = key(also="pattern params parameters name_pattern")
    """A pattern of names, such as `*norm*` or `model.layers.*.self_attn.*`."""
    lr: float | None = key(None, above=0, also="learning_rate max_lr")
    """Their highest learning rate, which follows the same course. null: `optimizer.lr`."""
    lr_scale: float = key(1.0, above=0, also="lr_mult lr_multiplier")
    """What multiplies `optimizer.lr` for them: an `lr` that follows it."""
    weight_decay: float | None = key(None, minimum=0, also="wd")
    """Their decay. null: `optimizer.weight_decay` of those with two or more dims."""
    name: OptimizerName | None = key(None, also="optimizer type")  # noqa: RUF009 (a Literal)
    """Their optimizer. null: `optimizer.name`."""


@dataclass(frozen=True)
class Optimizer:
    """The optimizer, and the learning rate over the run."""

    name: OptimizerName = key("adamw", also="type optimizer")  # noqa: RUF009 (a Literal)
    """The optimizer. `muon` is for matrices: embeddings, heads and what has one dim get `adamw`."""
    lr: float = key(3e-4, above=0, also="learning_rate max_lr")
    """The highest learning rate."""
    min_lr: float = key(0.0, minimum=0, also="lr_min final_lr")
    """The learning rate at the end of the run."""
    betas: tuple[float, float] = key((0.9, 0.95), minimum=0, below=1, also="beta1 beta2 adam_beta1")
    """AdamW's two decay rates of its averages."""
    eps: float = key(1e-8, above=0, also="epsilon adam_eps")
    """AdamW's term in the denominator."""
    state_precision: Literal["float32", "bfloat16"] = key(
        "float32", also="state_dtype exp_avg_dtype exp_avg_sq_dtype bf16_optimizer_states bf16_states"
    )
    """The numbers in which AdamW's two averages are kept. `bfloat16`: by stochastic rounding that is the same on every
    layout; a checkpoint fits runs with the same value. `float32`: the type of the weights."""
    weight_decay: float = key(0.1, minimum=0)
    """Decay of the weights with two or more dims; the others do not decay."""
    momentum: float = key(0.95, minimum=0, below=1)
    """The decay rate of the momentum of Muon and SGD."""
    nesterov: bool = True
    """Muon and SGD: whether a step looks ahead along the momentum."""
    ema_decay: float | None = key(None, above=0, below=1, also="ema ema_beta ema_alpha use_ema")
    """The decay rate, in each update, of an average of all weights that is kept beside them. null: none is kept."""
    groups: tuple[ParamGroup, ...] = key((), also="param_groups parameter_groups")
    """Parameters with a rate, a decay or an optimizer of their own; the keys of each group are below."""
    clip_norm: float | None = key(1.0, above=0, also="grad_clip max_grad_norm clip_grad gradient_clipping max_norm")
    """The norm of all gradients together to which they are clipped. null: they are not."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = key(
        "cosine", also="lr_schedule scheduler lr_scheduler lr_scheduler_type"
    )
    """The course of the learning rate after the warm-up. `wsd` stays at `lr` and falls in the last `decay_steps`."""
    warmup_steps: int = key(20, minimum=0, also="warmup num_warmup_steps")
    """Update n of the warm-up has the rate `lr` * n / `warmup_steps`."""
    decay_steps: int | None = key(None, minimum=1, also="lr_decay_iters")
    """`wsd`: the length of the final decay. null: a tenth of the steps."""


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters beside linear layers, which alone are trained: docs/finetuning.md has more."""

    rank: int = key(minimum=1, also="r lora_rank lora_r")
    """Of the two matrices of an adapter, (rank, d) and (f, rank)."""
    alpha: float | None = key(None, above=0, also="lora_alpha")
    """Their product is multiplied by `alpha` / `rank`. null: by 1."""
    match: tuple[str, ...] = key((), also="target_modules targets modules")
    """Patterns of names of linear layers inside of blocks that get one, such as `*.q_proj`. Without any: all."""
    dropout: float = key(0.0, minimum=0, below=1, also="lora_dropout")
    """The probability with which elements of an adapter's input are set to 0."""


@dataclass(frozen=True)
class Fault:
    """One fault: what happens to which rank, and when."""

    fault: Literal["kill", "stop", "slow", "raise", "fail-save"] = key(also="kind type what")
    """`kill` (SIGKILL) ends the process without a word, `stop` (SIGSTOP) makes it silent, `slow` makes its steps
    longer, `raise` is an exception, and `fail-save` a disk that is full."""
    step: int = key(minimum=1, also="at at_step from from_step")
    """At the beginning of this step, or in the save of its checkpoint. `slow`: the first slow step."""
    rank: int | None = key(None, minimum=0, also="ranks who")
    """Whose. null is for `fail-save` alone, and means every rank."""
    during: Literal["step", "save"] = key("step")
    """`save`: while the rank writes its file of the checkpoint. `fail-save` is always then."""
    seconds: float | None = key(None, above=0, also="delay sleep")
    """`slow`: how much longer each step, or the save, takes."""
    until: int | None = key(None, minimum=1, also="to last")
    """`slow`: the last slow step. null: the last one of the run."""
    again: bool = False
    """Whether it is planted once more when the launcher starts the job anew."""

    @property
    def in_save(self) -> bool:
        return self.during == "save" or self.fault == "fail-save"


@dataclass(frozen=True)
class Train:
    """The run: how long, in which numbers, and where it writes."""

    steps: int | None = key(None, minimum=1, also="max_steps num_steps iterations max_iters train_iters")
    """Updates of the run. Give this or `epochs`."""
    epochs: int | None = key(None, minimum=1, also="num_epochs max_epochs num_train_epochs")
    """Passes over the training set. Give this or `steps`."""
    seed: int = key(0, minimum=0, maximum=2**63 - 1)
    """Fixes the first weights and the order of the samples."""
    freeze: tuple[str, ...] = key((), also="frozen freeze_modules freeze_layers")
    """Patterns of names of parameters that stay as they are, for instance `model.embed_tokens.*`."""
    lora: Lora | None = key(None, also="peft adapters")  # noqa: RUF009 (a dataclass)
    """Low-rank adapters, which alone are trained; the keys are below."""
    precision: Literal["float32", "bfloat16", "float16", "float64"] = key(
        "float32", also="dtype torch_dtype mixed_precision bf16 fp16"
    )
    """The numbers of forward and backward. 16 bits keep float32 weights; `float64` checks a layout without rounding."""
    linear_precision: Literal["float8", "mxfp8"] | None = key(
        None,
        also="fp8 float8_rowwise enable_fp8 use_fp8 float8_recipe fp8_recipe",
        instead=("fp8 e4m3 hybrid tensorwise rowwise", "use float8, scaled for each token and each row of a weight"),
    )
    """What linear layers inside of blocks multiply in forward and for the gradients of inputs: `float8` is e4m3 with a
    scale for each token and each row of a weight, `mxfp8` with one for each 32 features; all else has `precision`. GPUs
    need `bfloat16` beside it; CPUs and GPUs without these numbers emulate them."""
    deterministic: bool = False
    """Whether only kernels are used that give the same bits every time."""
    output: str = key("runs/{name}", path=True, also="output_dir out_dir save_dir out")
    """The run's folder. `{name}` stands for the name of the config."""
    export: str | None = key(None, path=True, also="export_dir save_model export_path")
    """A folder, new or of an earlier export, that gets the weights at the end as Hugging Face's transformers reads."""
    export_format: Literal["original", "fused"] = key("original", also="save_original_format")
    """How an export has experts: `original`, a tensor per expert, as models are published, or `fused`, those of a layer
    in one tensor. transformers reads both."""
    use_ema: bool = key(False, also="eval_ema ema_eval")
    """With `optimizer.ema_decay`: whether evaluations, the text at the end and the export are of the average."""
    eval_every: int | Literal["epoch"] = key(50, minimum=0, also="eval_interval eval_steps")
    """Steps between evaluations, `epoch` for the end of each epoch, or 0 for never."""
    eval_samples: int | None = key(None, minimum=1, also="eval_iters eval_batches max_eval_samples limit_val_batches")
    """At most so many held-out samples make an evaluation, always the same. null: 2,048 of tokens, all images."""
    on_nonfinite: Literal["stop", "skip"] = key("stop")
    """What happens to a step whose loss or gradient is not finite: the run stops, or the update is skipped."""
    time_limit: str | float | None = key(
        None, above=0, also="max_time walltime timeout exit_duration_in_mins max_duration"
    )
    """How long a job of this run may take: `3h50m`, `90s`, `2d`, or seconds. It saves a checkpoint and stops before
    that. null: no limit, but the end of a SLURM job is one."""
    start_timeout_s: float = key(600.0, above=0)
    """Seconds that ranks wait for each other while the job starts."""
    lock_timeout_s: float = key(120.0, minimum=0)
    """Seconds that a job waits for its folders, which the one before may hold on a host that was lost."""
    step_timeout_s: float | None = key(None, above=0)
    """Seconds that ranks wait for each other in a step. null: chosen from measured steps."""
    on_exit: str | None = key(None, also="on_end callback notify")
    """A shell command that runs once when the run ends, however it does, for 30 s: see docs/monitoring.md."""
    sample_tokens: int = key(200, minimum=0)
    """Tokens of the text that a language model writes at the end; 0 for none."""
    chaos: tuple[Fault, ...] = key((), also="faults fault_injection")
    """Faults planted on purpose, in the first start of a job, to rehearse what happens; the keys of each are below."""

    @property
    def time_limit_s(self) -> float | None:
        return None if self.time_limit is None else seconds(self.time_limit)


@dataclass(frozen=True)
class Checkpoint:
    """When the state of a run is saved, which of these are kept, and with which a run begins."""

    every: int | Literal["epoch"] = key(
        100, minimum=0, also="save_steps save_interval save_every save_freq interval checkpoint_every"
    )
    """Steps between checkpoints, `epoch`, or 0 for the end of the run alone. A run asked to stop saves one too."""
    keep_last: int = key(3, minimum=1, also="save_total_limit keep_latest_k max_to_keep")
    """How many of the newest are kept."""
    keep_every: int | None = key(None, minimum=1, also="keep_period")
    """Those of every so many steps are kept for good. null: none."""
    keep_best: bool = key(False, also="save_best save_best_only load_best_model_at_end")
    """Whether the one with the best evaluation is kept: the lowest loss, or of a classifier the highest accuracy."""
    resume: str = key("latest", path=True, also="resume_from_checkpoint resume_from auto_resume load load_checkpoint")
    """What a run goes on from: `latest` is the newest of its own that is whole, `none` wants a fresh folder, and
    anything else is the path of a checkpoint, or of another run's folder."""
    path: str | None = key(None, path=True, also="dir folder checkpoint_dir save_dir dump_folder")
    """The folder of the checkpoints, which all hosts have to see. null: `checkpoints` in the run's folder."""
    local: str | None = key(None, path=True, also="local_dir node_local_dir fast_dir non_persistent_local_ckpt_dir")
    """A folder on a disk of each host's own, to which checkpoints are written first, and from which a run goes on
    where all hosts have theirs. null: none."""
    upload: str | None = key(None, also="remote_dir remote_folder upload_to s3_path cloud_dir")
    """Object storage, such as `s3://bucket/prefix`, to which complete checkpoints are uploaded in the background, and
    from which a run goes on where its folder has none as new. null: none."""
    in_background: bool = key(True, also="async async_save async_mode")
    """Whether training goes on while a checkpoint is written, and waits for a copy in memory only."""
    on_failure: Literal["continue", "stop"] = key("continue")
    """What the run does when a checkpoint could not be written: it goes on and says so, or it stops."""
    make_room: bool = False
    """Whether on a full disk the oldest checkpoint that a save would drop goes before it, never the newest."""
    timeout_s: float = key(1800.0, minimum=900, also="save_timeout async_save_timeout")
    """Seconds after which a save is given up, and training goes on: a file system that fails over takes minutes."""
    allow_other_data: bool = key(False, also="ignore_data")
    """Whether a run may go on with other data than those of its checkpoint."""


@dataclass(frozen=True)
class Metrics:
    """What is written for people to watch, besides the progress line and `metrics.jsonl`."""

    sinks: tuple[str, ...] = key((), also="report_to loggers logger log_with trackers")
    """Who gets the numbers besides: `prometheus`, `tensorboard`, `wandb`, or a class of your own, as `sink.py:Mine`."""
    sink_options: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The options of each sink that has any, by its name: docs/monitoring.md has them."""
    tensorboard: bool = False
    """Whether `tensorboard` is one of the sinks."""
    profile: tuple[int, int] | None = key(None, minimum=1)
    """The first and the last step, counted from 1, that `torch.profiler` records."""
    timeline: int | None = key(None, minimum=1)
    """With `pp`: the step, counted from 1, whose measured timeline is written to `timeline.json`."""
    gpu_probe: int = key(0, minimum=0)
    """Every so many steps each GPU multiplies matrices for 5 ms, which finds one that is slow; 0: never."""
    memory_snapshot: bool = False
    """Whether a snapshot of the GPU's memory is written at the end."""

    @property
    def all_sinks(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.sinks, *(["tensorboard"] if self.tensorboard else []))))


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
NAMES = ("model", "data", "layout", *(name for name in SECTIONS if name != "data"))  # in the order they are written
