"""The sections of a config as dataclasses: each key once, with its type, default, limits and
meaning.

The string below a field is its documentation, from which docs/configuration.md and
configs/schema.json are generated.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from meshtrain.config.keys import key, seconds
from meshtrain.data.order import BatchSizes
from meshtrain.pipeline.schedule import NAMES as NAMES_OF_SCHEDULES

# Words of the config, which stand here so that it is read without what they name. Each has its
# entry in optim/registry.py, metrics/sinks.py or data/sources.py.
OptimizerName = Literal["adamw", "muon", "sgd"]
SINKS = ("mlflow", "prometheus", "tensorboard", "wandb")

# data.source -> what data.path names, or None if the source takes no path.
SOURCES: dict[str, str | None] = {
    "python-stdlib": None,
    "text": "a text file, or a folder of .txt and .md files",
    "jsonl": "a .jsonl file, plain or packed (.gz, .zst), or a folder of them",
    "parquet": "a .parquet file, or a folder of them",
    "hub": "a data set of the Hugging Face hub, as org/name or org/name@revision",
    "tokens": "the folder of a token file, or its URL in object storage, such as s3://bucket/folder",
    "megatron": "the prefix of a .bin and an .idx file",
    "digits": None,
    "mnist": "the folder of MNIST's idx files",
    "images": "a folder with one folder of images per class",
}
OF_TEXT = ("python-stdlib", "text", "jsonl", "parquet", "hub")  # sources that are tokenized


@dataclass(frozen=True)
class ModelSection:
    """Which model, and its sizes. The other keys of the section are those of the model's own
    `Config`."""

    name: str = key("llama", path=True)
    """One of meshtrain's models, or the path of a `.py` file of your own."""
    preset: str | None = None
    """A named size of the model. The keys given beside it override it."""
    weights: str | None = key(
        None,
        path=True,
        also="pretrained pretrained_model_name_or_path model_name_or_path checkpoint init_from",
    )
    """What to start from: a Hugging Face directory, a checkpoint, or a model of the hub
    (`org/name`, `org/name@revision`). Keys not given here come from its config."""
    # the model's Config: given, from preset or weights, or default
    keys: dict[str, Any] = field(default_factory=dict)


# the section's keys that are no field of the model's Config
OWN_MODEL_KEYS = (
    "name",
    "preset",
    "weights",
)


@dataclass(frozen=True)
class SourceSection:
    """One source of a mixture. Samples of the sources are mixed in exact shares: see
    [data](data.md#mixtures)."""

    name: str = key()
    """The source's name in metrics; also seeds the order of its samples."""
    path: str | None = key(None, path=True, also="data_path file dir")
    """Same as `data.path`, for this source."""
    weight: float | tuple[tuple[int, float], ...] = key(
        1.0, minimum=0, also="weights ratio share proportion"
    )
    """The source's share of the samples, in proportion to the weights of the other sources."""
    epochs: int | None = key(None, minimum=1, also="max_epochs repeat")
    """The most passes over this source that a run may make: a run that would make more is refused
    at its start."""
    source: str | None = key(None, names=tuple(SOURCES), also="type kind")
    """The kind of this source, one of text or tokens. null: the value of `data.source`."""
    subset: str | None = None
    """Same as `data.subset`, for this source. null: the value of `data.subset`."""
    split: str | None = None
    """Same as `data.split`, for this source. null: the value of `data.split`."""


@dataclass(frozen=True)
class DataSection:
    """The data that the model is trained and evaluated on."""

    source: str = key(
        "python-stdlib", path=True, names=tuple(SOURCES), suffix=".py", also="dataset name type"
    )
    """Where samples come from, or the path of a `.py` file of your own. `python-stdlib`: Python's
    standard library."""
    path: str | None = key(
        None,
        doc="What the source reads: "
        + "; ".join(
            f"for `{name}` {description}" for name, description in SOURCES.items() if description
        )
        + ".",
        path=True,
        also="data_path file dataset_path dir root",
    )
    subset: str | None = key(None, also="dataset_config dataset_config_name config_name")
    """For `hub`: the configuration of the data set, where it has several."""
    split: str = key("train", also="train_split dataset_split")
    """For `hub`: the split that is trained on."""
    sources: tuple[SourceSection, ...] = key((), also="mixture blend data_mixture datasets")
    """Several sources to mix, instead of `path`; the keys of each are below."""
    validation: float | str = key(
        0.02, path=True, minimum=0, below=1, also="val valid validation_split"
    )
    """The validation set: a share of the documents or samples to hold out, the path of another data
    set (for `hub` the name of another split), or 0: none."""
    tokenizer: str = key("bytes", names=("bytes",), suffix=".json", path=True, hub=True)
    """`bytes`, the path of a Hugging Face `tokenizer.json`, or a model of the hub that has one
    (`org/name`)."""
    begin_token: str | None = key(None, also="bos_token add_bos bos prepend_bos begin_of_text")
    """The token that begins each document and prompt: `auto` (the `bos_token` of the
    `tokenizer_config.json` beside `tokenizer`) or a token of the vocabulary, such as `<s>`. It is
    no target with a loss. null: none."""
    end_token: str | None = key(None, also="eos_token add_eos eos end_of_text eod_token")
    """The token that ends each document. null: the `eos_token` of the `tokenizer_config.json`
    beside `tokenizer`, or a usual one. See [data](data.md#text)."""
    loss_on: Literal["all", "last"] = key(
        "all", also="train_on assistant_only_loss train_on_last last_turn_only"
    )
    """Which of a conversation's answers carry a loss: `all`, or only the `last`; none with `train:
    false` does."""
    text_field: str = key("text", also="text_key text_column content_field")
    """For `jsonl`, `parquet` and `hub`: the field or column that holds the text of a document."""
    seq_len: int = key(
        256, minimum=1, also="sequence_length seq_length context_length block_size max_seq_len"
    )
    """Tokens per sample."""
    seq_len_warmup: tuple[tuple[int, int], ...] = key(
        (), minimum=1, also="sequence_length_warmup curriculum_learning"
    )
    """Lengths to which samples are cut early in the run, up to `seq_len`: `[[0, 64], [1000,
    256]]`."""
    mask_documents: bool = False
    """Whether attention stays within a document where several share a sample. Faster on GPUs in 16
    bits. A model of your own that carries anything from one to the next is refused
    (`parallel.verify`)."""
    augment: bool = key(False, also="augmentation")
    """Whether training images are shifted and mirrored at random."""
    image_size: int | None = key(None, minimum=1)
    """Height and width, in pixels, to which images are resized. null: as they are; required for
    `images`."""
    workers: int = key(2, minimum=0, also="num_workers")
    """Worker processes per rank that read data ahead. 0 reads in the training process, as macOS
    always does."""
    cache: str | None = key(None, path=True, also="cache_dir")
    """The folder of prepared token files. null: `meshtrain` in the user's cache folder."""
    cache_gib: float = key(100.0, above=0, also="cache_size cache_limit")
    """For `tokens` in object storage: how many GiB of a source's tokens each host keeps in
    `cache`."""

    def each_source(self) -> "list[DataSection]":
        """One section per source, as if it were alone; a validation set given by a path goes to the
        first one."""
        alone = []
        for i, own in enumerate(self.sources):
            validation = 0.0 if i and isinstance(self.validation, str) else self.validation
            alone.append(
                replace(
                    self,
                    sources=(),
                    source=own.source or self.source,
                    path=own.path,
                    subset=own.subset or self.subset,
                    split=own.split or self.split,
                    validation=validation,
                )
            )
        return alone or [self]


@dataclass(frozen=True)
class BatchSection:
    """The number of samples per step, and per forward."""

    global_size: int | tuple[tuple[int, int], ...] = key(
        minimum=1, also="batch_size global_batch_size train_batch_size size rampup_batch_size"
    )
    """Samples per step, over all ranks. `[[0, 64], [2000, 256]]` is 64 in the first 2000 steps, and
    then 256."""
    micro_size: int = key(
        minimum=1, also="micro_batch_size per_device_train_batch_size local_batch_size"
    )
    """Samples per forward on one rank; determines the number of forwards per step."""

    @property
    def sizes(self) -> BatchSizes:
        """`global_size` of each step."""
        return BatchSizes.of(self.global_size)


@dataclass(frozen=True)
class ParallelSection:
    """How ranks store and run the model. No key changes what is computed, except that
    `reduce_precision` rounds."""

    sequence_parallel: bool | None = key(None, also="sequence_parallelism sp")
    """With `tp`: whether activations between parallel layers are split along the sequence. null: if
    the model's `tp_plan` has an `embedding_rowwise_sequence` layer, which makes the split."""
    regather: bool = False
    """With `tp`: whether a layer's input is gathered again in backward instead of being kept."""
    symmetric_memory: bool | Literal["auto"] = key(False, also="async_tp async_tensor_parallel")
    """With `tp` and `sequence_parallel` on GPUs: whether matrix products and their communication
    run as one kernel. `auto`: where NVLink connects all GPUs of `tp`. true also puts FSDP's
    messages into memory registered with NCCL. No machine has shown yet that it is faster."""
    context: Literal["gather", "ring"] = key(
        "gather",
        also="cp_comm_type context_parallel_method cp_method",
        instead=(
            "ulysses a2a all_to_all a2a+p2p",
            "with context_heads: 4 ranks swap heads, which is Ulysses",
        ),
    )
    """With `cp`: how keys and values travel: `gather` brings all of them to every rank, `ring`
    passes them around."""
    context_heads: int = key(
        1, minimum=1, also="ulysses ulysses_size ulysses_degree sp_ulysses_degree"
    )
    """With `cp`: how many neighbouring ranks split attention heads instead. If equal to `cp`,
    DeepSpeed's Ulysses."""
    expert_parallel: int | None = key(
        None,
        minimum=1,
        also="ep ep_size expert_parallel_size expert_parallel_degree expert_model_parallel_size",
    )
    """The number of ranks over which the experts of a layer are distributed, taken from `tp`, `cp`,
    `dp_shard` and `dp_replicate`, the inner ones first. null: the size of `tp`."""
    expert_rows: float | None = key(None, minimum=1, also="expert_buffer expert_buffer_size")
    """With expert parallelism: messages to experts get a fixed size, this multiple of the rows
    under an even load, so that the host waits for the device only at the end of a step. No row is
    dropped: a step that overflows is computed again. null: the exact sizes, for which the host
    waits once per layer and forward."""
    offload: Literal["none", "optimizer", "activations", "both"] = key(
        "none",
        also="cpu_offload offload_optimizer optimizer_cpu_offload activation_offloading "
        "cpu_offloading activations_cpu_offload",
    )
    """What waits in the host's memory instead of the device's: `optimizer`: the optimizer's states
    and averages, which an update brings to the device some at a time; `activations`: what blocks
    save for their backward. Results are the same to the bit. See docs/performance.md."""
    recompute: Literal["none", "selective", "full"] = key(
        "none", also="activation_checkpointing gradient_checkpointing checkpoint_activations"
    )
    """What is recomputed in backward: `full`: the inside of every block; `selective`: all but
    expensive products."""
    compile: bool | Literal["auto"] = key("auto", also="torch_compile")
    """Whether each block is compiled with `torch.compile`. `auto`: on GPUs, where Triton builds its
    kernels and the schedule computes whole backwards."""
    reshard_after_forward: bool = True
    """FSDP: whether a block's gathered weights are freed after forward and gathered again in
    backward."""
    shard_optimizer: bool = key(
        False, also="zero1 zero_1 zero_stage use_distributed_optimizer distributed_optimizer"
    )
    """DDP: whether the replicas of `dp_replicate` shard the optimizer's work and states (ZeRO-1),
    as FSDP does."""
    reduce_precision: Literal["float32", "bfloat16"] | None = key(
        None, also="reduce_dtype grad_reduce_dtype"
    )
    """The dtype in which gradients are sent and summed over the data ranks. With `bfloat16` the
    rounding depends on the layout. null: the dtype in which they are kept, float32 or float64."""
    sync_batch_norm: bool = key(False, also="sync_bn syncbn sync_batchnorm convert_sync_batchnorm")
    """Whether batch norms compute with the samples of all data ranks: the statistics are those of
    one process if a step is one microbatch, so `batch.micro_size` has to be `batch.global_size`
    divided by the data ranks."""
    verify: bool | Literal["auto"] = "auto"
    """With `tp` or `cp`: whether the split model is compared with the unsplit one before the first
    step. With several data ranks, `cp` or `recompute`: whether a model is refused whose result for
    a sample depends on earlier forwards or, with several data ranks, on the others of its batch, or
    whose first forward changes its persistent buffers. With `data.mask_documents`: whether one is
    refused whose result for a document depends on the one before it in its row. `auto`: for a model
    of your own; those of meshtrain are compared on all layouts by its tests."""

    @property
    def offloads_optimizer(self) -> bool:
        return self.offload in ("optimizer", "both")

    @property
    def offloads_activations(self) -> bool:
        return self.offload in ("activations", "both")


@dataclass(frozen=True)
class PipelineSection:
    """With `pp`: how the model's blocks form stages, and in which order a rank runs its stages."""

    schedule: str = key(
        "1f1b",
        path=True,
        names=NAMES_OF_SCHEDULES,
        suffix=".csv",
        also="pipeline_schedule pp_schedule pipeline_parallel_schedule",
    )
    """The name of a schedule, or the path of a `.csv` file."""
    stages_per_rank: int | None = key(
        None, minimum=1, also="virtual_stages num_virtual_stages virtual_pipeline_size"
    )
    """Stages per rank. null: the number the schedule needs, 2 for interleaved ones."""
    split: tuple[int, ...] | None = key(None, minimum=1)
    """The number of blocks of each stage, first to last. null: balanced by the blocks' cost."""


@dataclass(frozen=True)
class ParamGroupSection:
    """Parameters with optimizer settings of their own. A parameter is in the first group that
    matches its name."""

    match: str = key(also="pattern params parameters name_pattern")
    """A pattern of names, such as `*norm*` or `model.layers.*.self_attn.*`."""
    lr: float | None = key(None, above=0, also="learning_rate max_lr")
    """The group's highest learning rate, which follows the same schedule. null: `optimizer.lr`."""
    lr_scale: float = key(1.0, above=0, also="lr_mult lr_multiplier")
    """A factor on `optimizer.lr` for the group."""
    weight_decay: float | None = key(None, minimum=0, also="wd")
    """The group's weight decay. null: `optimizer.weight_decay` for parameters with two or more
    dims."""
    name: OptimizerName | None = key(None, also="optimizer type")
    """The group's optimizer. null: `optimizer.name`."""


@dataclass(frozen=True)
class OptimizerSection:
    """The optimizer, and the learning rate over the run."""

    name: OptimizerName = key("adamw", also="type optimizer")
    """The optimizer. `muon` is for matrices: embeddings, heads and parameters with one dim get
    `adamw`."""
    lr: float = key(3e-4, above=0, also="learning_rate max_lr")
    """The highest learning rate."""
    min_lr: float = key(0.0, minimum=0, also="lr_min final_lr")
    """The learning rate at the end of the run."""
    betas: tuple[float, float] = key((0.9, 0.95), minimum=0, below=1, also="beta1 beta2 adam_beta1")
    """The decay rates of AdamW's two moving averages."""
    eps: float = key(1e-8, above=0, also="epsilon adam_eps")
    """AdamW's epsilon, added to the denominator."""
    state_precision: Literal["float32", "bfloat16"] = key(
        "float32",
        also="state_dtype exp_avg_dtype exp_avg_sq_dtype bf16_optimizer_states bf16_states",
    )
    """The dtype of AdamW's two averages. `bfloat16`: with stochastic rounding that is the same on
    every layout; a checkpoint fits only runs with the same value. `float32`: the dtype of the
    weights."""
    weight_decay: float = key(0.1, minimum=0)
    """Weight decay of parameters with two or more dims; the others do not decay."""
    momentum: float = key(0.95, minimum=0, below=1)
    """The decay rate of Muon's and SGD's momentum."""
    nesterov: bool = True
    """Muon and SGD: whether to use Nesterov momentum."""
    ema_decay: float | None = key(None, above=0, below=1, also="ema ema_beta ema_alpha use_ema")
    """The decay rate per update of an exponential moving average (EMA) of all weights. null: no
    average is kept."""
    groups: tuple[ParamGroupSection, ...] = key((), also="param_groups parameter_groups")
    """Parameters with a learning rate, decay or optimizer of their own; the keys of each group are
    below."""
    clip_norm: float | None = key(
        1.0, above=0, also="grad_clip max_grad_norm clip_grad gradient_clipping max_norm"
    )
    """The norm to which all gradients together are clipped. null: no clipping."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = key(
        "cosine", also="lr_schedule scheduler lr_scheduler lr_scheduler_type"
    )
    """The learning rate schedule after the warm-up. `wsd` stays at `lr` and falls in the last
    `decay_steps`."""
    warmup_steps: int = key(20, minimum=0, also="warmup num_warmup_steps")
    """Update n of the warm-up has the rate `lr` * n / `warmup_steps`."""
    decay_steps: int | None = key(None, minimum=1, also="lr_decay_iters")
    """`wsd`: the length of the final decay. null: a tenth of the steps."""


@dataclass(frozen=True)
class LoraSection:
    """Low-rank adapters on linear layers; only the adapters are trained. See docs/finetuning.md."""

    rank: int = key(minimum=1, also="r lora_rank lora_r")
    """The rank of an adapter's two matrices, (rank, d) and (f, rank)."""
    alpha: float | None = key(None, above=0, also="lora_alpha")
    """The product of the two matrices is multiplied by `alpha` / `rank`. null: by 1."""
    match: tuple[str, ...] = key((), also="target_modules targets modules")
    """Name patterns of the linear layers in blocks that get an adapter, such as `*.q_proj`. Empty:
    all of them."""
    dropout: float = key(0.0, minimum=0, below=1, also="lora_dropout")
    """The probability with which elements of an adapter's input are set to 0."""


@dataclass(frozen=True)
class ReferenceSection:
    """A frozen second model, whose outputs the model file's `loss` gets. See docs/losses.md."""

    weights: str = key(path=True, also="model_name_or_path pretrained path checkpoint")
    """A Hugging Face directory, a checkpoint or a model of the hub, read as `model.weights` is: of
    the same model, with the same sizes."""


@dataclass(frozen=True)
class FaultSection:
    """One injected fault: what happens to which rank, and when."""

    fault: Literal["kill", "stop", "slow", "raise", "fail-save"] = key(also="kind type what")
    """`kill` (SIGKILL) ends the process at once, `stop` (SIGSTOP) freezes it, `slow` prolongs its
    steps, `raise` raises an exception, and `fail-save` simulates a full disk."""
    step: int = key(minimum=1, also="at at_step from from_step")
    """The step at whose beginning the fault happens. `slow`: the first slow step; `fail-save`: the
    step after which the checkpoint is saved."""
    rank: int | None = key(None, minimum=0, also="ranks who")
    """The rank that the fault happens to. null: every rank, for `fail-save` only."""
    seconds: float | None = key(None, above=0, also="delay sleep")
    """`slow`: how much longer each step takes, to the end of the run."""

    @property
    def in_save(self) -> bool:
        return self.fault == "fail-save"


@dataclass(frozen=True)
class TrainSection:
    """The run: its length, its precision, and where it writes."""

    steps: int | None = key(
        None, minimum=1, also="max_steps num_steps iterations max_iters train_iters"
    )
    """The number of updates. Give this or `epochs`."""
    epochs: int | None = key(None, minimum=1, also="num_epochs max_epochs num_train_epochs")
    """Passes over the training set. Give this or `steps`."""
    seed: int = key(0, minimum=0, maximum=2**63 - 1)
    """Determines the initial weights and the order of the samples."""
    freeze: tuple[str, ...] = key((), also="frozen freeze_modules freeze_layers")
    """Name patterns of parameters that are not trained, for instance `model.embed_tokens.*`."""
    lora: LoraSection | None = key(None, also="peft adapters")
    """Low-rank adapters, the only parameters trained then; the keys are below."""
    reference: ReferenceSection | None = key(
        None, also="reference_model ref_model teacher teacher_model"
    )
    """A frozen second model of the same class, for a `loss` of the model file that compares with
    it; the key is below."""
    label_smoothing: float = key(
        0.0, minimum=0, below=1, also="label_smoothing_factor smoothing loss_label_smoothing"
    )
    """The part of each target's weight in the loss that all classes or tokens share, as in torch's
    `cross_entropy`. Evaluations leave it out."""
    z_loss: float = key(
        0.0, minimum=0, also="z_loss_coef z_loss_multiplier z_loss_weight lm_head_z_loss zloss"
    )
    """The factor of `logsumexp(logits)`² in the loss of each target, such as 1e-4, which keeps the
    logits of the output from growing. Evaluations leave it out."""
    mtp_loss_scaling_factor: float | tuple[tuple[int, float], ...] = key(
        0.1, minimum=0, also="mtp_loss_weight mtp_loss_coef mtp_loss_lambda mtp_lambda"
    )
    """Of a model that predicts further tokens: what the mean of these losses counts beside the
    loss. A list of changes, such as `[[0, 0.3], [50000, 0.1]]`, is the weight from these steps
    on."""
    precision: Literal["float32", "bfloat16", "float16", "float64"] = key(
        "float32", also="dtype torch_dtype mixed_precision bf16 fp16"
    )
    """The dtype of forward and backward. With 16 bits weights stay float32; `float64` is for
    checking layouts."""
    linear_precision: Literal["float8"] | None = key(
        None,
        also="fp8 float8_rowwise enable_fp8 use_fp8 float8_recipe fp8_recipe",
        instead=(
            "fp8 e4m3 hybrid tensorwise rowwise",
            "use float8, scaled for each token and each row of a weight",
        ),
    )
    """The dtype in which linear layers in blocks multiply in forward and for the gradients of
    inputs: `float8` is e4m3 with a scale per token and per row of a weight; all else uses
    `precision`. On GPUs it needs `precision: bfloat16`; CPUs and GPUs without this format emulate
    it."""
    deterministic: bool = False
    """Whether to use only kernels that give the same bits every time."""
    output: str = key("runs/{name}", path=True, also="output_dir out_dir save_dir out")
    """The run's folder. `{name}` stands for the name of the config."""
    export: str | None = key(None, path=True, also="export_dir save_model export_path")
    """A folder, new or of an earlier export, for the final weights in the format of Hugging Face's
    transformers."""
    use_ema: bool = key(False, also="eval_ema ema_eval")
    """With `optimizer.ema_decay`: whether evaluations, the sample text at the end and the export
    use the average."""
    eval_every: int | Literal["epoch"] = key(50, minimum=0, also="eval_interval eval_steps")
    """Steps between evaluations, `epoch` for the end of each epoch, or 0 for never."""
    eval_samples: int | None = key(
        None, minimum=1, also="eval_iters eval_batches max_eval_samples limit_val_batches"
    )
    """The most held-out samples of an evaluation, always the same ones. null: 2,048 of tokens, or
    all images."""
    on_nonfinite: Literal["stop", "skip"] = key("stop")
    """What happens to a step whose loss or gradient is not finite: the run stops, or the update is
    skipped."""
    time_limit: str | float | None = key(
        None, above=0, also="max_time walltime timeout exit_duration_in_mins max_duration"
    )
    """How long a job of this run may take: `3h50m`, `90s`, `2d`, or seconds. It saves a checkpoint
    and stops before that. null: no limit other than the end of a SLURM job."""
    start_timeout_s: float = key(600.0, above=0)
    """Seconds that ranks wait for one another while the job starts, and three times as long while
    one of them is busy and does not get on."""
    step_timeout_s: float | None = key(None, above=0)
    """Seconds that ranks wait for one another in a step. null: chosen from measured steps."""
    on_exit: str | None = key(None, also="on_end callback notify")
    """A shell command to run once when the run ends, however it ends, for at most 30 s: see
    docs/monitoring.md."""
    sample_tokens: int = key(200, minimum=0)
    """Tokens of sample text that a language model generates at the end; 0 for none."""
    chaos: tuple[FaultSection, ...] = key((), also="faults fault_injection")
    """Faults injected on purpose, in the first start of a job, to rehearse failures; the keys of
    each are below."""

    @property
    def time_limit_s(self) -> float | None:
        return None if self.time_limit is None else seconds(self.time_limit)


@dataclass(frozen=True)
class CheckpointSection:
    """When checkpoints are saved, which of them are kept, and from which a run starts."""

    every: int | Literal["epoch"] = key(
        100,
        minimum=0,
        also="save_steps save_interval save_every save_freq interval checkpoint_every",
    )
    """Steps between checkpoints, `epoch`, or 0: only at the end of the run. A run asked to stop
    saves one, too."""
    keep_last: int = key(3, minimum=1, also="save_total_limit keep_latest_k max_to_keep")
    """How many of the newest checkpoints are kept."""
    keep_every: int | None = key(None, minimum=1, also="keep_period")
    """Checkpoints whose step is a multiple of this are kept for good. null: none."""
    keep_best: bool = key(False, also="save_best save_best_only load_best_model_at_end")
    """Whether the checkpoint with the best evaluation is kept: the lowest loss, or a classifier's
    highest accuracy."""
    resume: str = key(
        "latest",
        path=True,
        also="resume_from_checkpoint resume_from auto_resume load load_checkpoint",
    )
    """What a run resumes from: `latest`: its newest complete checkpoint; `none`: nothing, the
    folder must be fresh; anything else: the path of a checkpoint, or of another run's folder."""
    path: str | None = key(None, path=True, also="dir folder checkpoint_dir save_dir dump_folder")
    """The folder of the checkpoints, which all hosts must share. null: `checkpoints` in the run's
    folder."""
    local: str | None = key(
        None, path=True, also="local_dir node_local_dir fast_dir non_persistent_local_ckpt_dir"
    )
    """A folder on each host's own disk to which checkpoints are written first, and from which a run
    resumes if all hosts still have theirs. null: none."""
    upload: str | None = key(None, also="remote_dir remote_folder upload_to s3_path cloud_dir")
    """Object storage, such as `s3://bucket/prefix`, to which complete checkpoints are uploaded in
    the background, and from which a run resumes if its folder has none as new. null: none."""
    in_background: bool = key(True, also="async async_save async_mode")
    """Whether training waits only for a copy in memory, and continues while the checkpoint is
    written."""
    timeout_s: float = key(1800.0, minimum=900, also="save_timeout async_save_timeout")
    """Seconds after which a save is abandoned and training continues. A file system's failover
    takes minutes."""
    allow_other_data: bool = key(False, also="ignore_data")
    """Whether a run may resume with data other than its checkpoint's."""


@dataclass(frozen=True)
class MetricsSection:
    """What is recorded for monitoring, besides the progress line and `metrics.jsonl`."""

    sinks: tuple[str, ...] = key((), also="report_to loggers logger log_with trackers")
    """Where else metrics are sent: `mlflow`, `prometheus`, `tensorboard`, `wandb`, or a class of
    your own, as `sink.py:Mine`."""
    sink_options: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Options of sinks: name of the sink -> its options, which docs/monitoring.md describes."""
    profile: tuple[int, int] | None = key(None, minimum=1)
    """The first and the last step, counted from 1, that `torch.profiler` records; on a GPU also the
    memory up to then."""
    timeline: int | None = key(None, minimum=1)
    """With `pp`: the step, counted from 1, whose measured timeline is written to
    `timeline.json`."""


# The sections that are plain dataclasses. `model` also has the keys of a model, and `layout` the
# axes of the mesh.
SECTIONS: dict[str, Any] = {
    "data": DataSection,
    "batch": BatchSection,
    "parallel": ParallelSection,
    "pipeline": PipelineSection,
    "optimizer": OptimizerSection,
    "train": TrainSection,
    "checkpoint": CheckpointSection,
    "metrics": MetricsSection,
}
# in the order they are written
NAMES = (
    "model",
    "data",
    "layout",
    *(name for name in SECTIONS if name != "data"),
)
