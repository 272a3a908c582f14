"""torchtitan's own trainer with the tokens, order and initial weights of meshtrain's side:
gpu_pair.py's baselines.

It uses torchtitan's Trainer, Llama 3 model, FSDP, compilation, recomputation and loss unchanged;
only the sample loader and the pauses between turns are ours. On one GPU torchtitan 0.2.2 computes
under autocast with a float32 residual stream; later versions wrap the model in FSDP on a mesh of
one. Three baselines:

    T-none  FSDP on a mesh of one, parameters gathered once per step, no recomputation:
            torchtitan as one would tune it
    T-sac   the same with its selective recomputation, which recomputes every second matrix product:
            its own recipe
    T-amp   0.2.2 unchanged: autocast
"""

import contextlib
import importlib.metadata
import importlib.util
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from baseline import Task
from harness import model_of

BASELINES = ("T-none", "T-sac", "T-amp")
NAME = "meshtrain-pair"
NEEDED = (
    "torchtitan",
    "torchdata",
    "tyro",
    "docstring_parser",
    "typeguard",
    "shtab",
    "tokenizers",
    "tensorboard",
)
NEEDED_0_3 = ("torch_checkpointing", "spmd_types")
WHEELS = {
    "docstring_parser": "docstring-parser",
    "torch_checkpointing": "torch-checkpointing",
    "spmd_types": "spmd-types==0.2.3",
}


def needed(baselines: Sequence[str]) -> str | None:
    """What these baselines lack, in one line; None: nothing."""
    # The version that fits this torch, where none is installed.
    fitting = "0.2" if torch.__version__.startswith("2.11.") else "0.3"
    old = (installed() or fitting).startswith("0.2")
    names = NEEDED if old else NEEDED + NEEDED_0_3
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        wheels = " ".join(WHEELS.get(name, name) for name in names if name in missing)
        wheels = wheels.replace("torchtitan", "torchtitan==0.2.2" if old else "torchtitan==0.3.0")
        return f"torchtitan's side needs {', '.join(missing)}: pip install --no-deps {wheels}"
    if "T-amp" in baselines and not old:
        return f"T-amp is a baseline of torchtitan 0.2: {installed()} has FSDP on one GPU too"
    return None


def installed() -> str | None:
    """torchtitan's version; None if it is not installed."""
    try:
        return importlib.metadata.version("torchtitan")
    except importlib.metadata.PackageNotFoundError:
        return None


def train(task: Task) -> None:
    """Trains in this process; at the end it writes each step's loss. `titan.baseline` of the config
    is one of `BASELINES`."""
    alone()
    if importlib.util.find_spec("datasets") is None:
        sys.modules |= stub("datasets", "Dataset", "load_dataset") | stub(
            "datasets.distributed", "split_dataset_by_node"
        )
    is_0_2 = importlib.metadata.version("torchtitan").startswith("0.2.")
    build = trainer_0_2 if is_0_2 else trainer_0_3
    settings = {"compile": True, "cuda_graphs": True, "folder": str(task.log.with_suffix(""))}
    config = task.config | {"titan": settings | task.config["titan"]}
    trainer = build(config, Samples(task), load_file(task.weights), paced(task.before_step))
    trainer.train()
    with task.writing() as write_step:
        for step, parts in enumerate(trainer.losses, start=1):
            write_step(step, {"loss": sum(loss.item() for loss in parts)})
    trainer.close()
    torch.distributed.destroy_process_group()


def alone() -> None:
    """Sets the environment variables of a job of one process."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    values = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": port,
    }
    os.environ.update({name: value for name, value in values.items() if name not in os.environ})


def stub(name: str, *functions: str) -> dict[str, ModuleType]:
    """A stand-in for a module that torchtitan imports for its own loaders, which are not used
    here."""
    module = ModuleType(name)
    for function in functions:
        setattr(module, function, None)
    return {name: module}


class Samples:
    """The microbatches of a run in meshtrain's order, in the form that torchtitan's trainer
    takes."""

    def __init__(self, task: Task) -> None:
        # The trainer, which asks for microbatches ahead, stops between turns itself.
        self.task = replace(task, before_step=lambda _: None)

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        micro = self.task.micro_size
        for _, samples in self.task.steps():
            for i in range(0, len(samples), micro):
                inputs, targets = self.task.read(samples[i : i + micro])
                yield self.inputs(inputs.contiguous()), targets.contiguous()

    def inputs(self, tokens: Tensor) -> dict[str, Tensor]:
        return {"input": tokens}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        del state


def paced(before_step: Callable[[int], None]) -> Callable[[type], type]:
    """Makes a subclass of a Trainer that stops between turns and keeps its losses on the device."""

    def subclass(trainer: type) -> type:
        class PacedTrainer(trainer):
            def train_step(self, data_iterator: Iterator[Any]) -> None:
                before_step(self.step)
                self.losses = [*getattr(self, "losses", []), []]
                super().train_step(data_iterator)

            def forward_backward_step(self, **arguments: Any) -> Tensor:
                loss = super().forward_backward_step(**arguments)
                self.losses[-1].append(loss.detach().clone())
                return loss

        return PacedTrainer

    return subclass


def put(config: Any, sections: dict[str, dict[str, Any]]) -> Any:
    """Sets nested attributes, all of which must exist already."""
    for name, values in sections.items():
        section = getattr(config, name)
        for key, value in values.items():
            getattr(section, key)
            setattr(section, key, value)
    return config


def rope_scaling(model: Any) -> dict[str, float]:
    """Llama 3's RoPE scaling; without one, a factor of 1 (no scaling). Raises ValueError: another
    kind of scaling."""
    scaling = model.rope_scaling or {"rope_type": "llama3", "factor": 1.0}
    if scaling.get("rope_type") != "llama3":
        raise ValueError(
            "torchtitan's Llama has rope_type llama3 alone, and the workload "
            f"{scaling.get('rope_type')!r}"
        )
    names = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    return {"scaling_factor": scaling["factor"]} | {
        name: scaling[name] for name in names if name in scaling
    }


# torchtitan 0.2 -----------------------------------------------------------------------------------


def sections_0_2(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The values of torchtitan 0.2's JobConfig for a workload, by section."""
    optimizer, baseline = config["optimizer"], config["titan"]["baseline"]
    recompute = (
        {"mode": "selective", "selective_ac_option": "op"}
        if baseline == "T-sac"
        else {"mode": "none"}
    )
    return {
        "job": {"dump_folder": config["titan"]["folder"]},
        "model": {"name": NAME, "flavor": NAME},
        "metrics": {"log_freq": 10**9},  # logging waits for the GPU
        "optimizer": {
            "name": "AdamW",
            "lr": optimizer["lr"],
            "beta1": optimizer["betas"][0],
            "beta2": optimizer["betas"][1],
            "eps": optimizer["eps"],
            "weight_decay": optimizer["weight_decay"],
            "implementation": "fused",
        },
        "lr_scheduler": {"warmup_steps": 0, "decay_ratio": 0.0, "min_lr_factor": 1.0},
        "training": {
            "local_batch_size": config["batch"]["micro_size"],
            "global_batch_size": config["batch"]["global_size"],
            "seq_len": config["data"]["seq_len"],
            "max_norm": optimizer["clip_norm"],
            "steps": config["train"]["steps"],
            "mixed_precision_param": config["train"]["precision"],
        },
        "checkpoint": {"enable": False},
        "activation_checkpoint": recompute,
        "compile": {"enable": config["titan"]["compile"], "components": ["model", "loss"]},
    }


def arguments_0_2(model: Any) -> dict[str, Any]:
    """Fields of torchtitan 0.2's TransformerModelArgs."""
    # torchtitan multiplies this, rounds down, then up to `multiple_of`
    hidden = int(2 * 4 * model.hidden_size / 3)
    return {
        "dim": model.hidden_size,
        "n_layers": model.num_hidden_layers,
        "n_heads": model.num_attention_heads,
        "n_kv_heads": model.kv_heads,
        "vocab_size": model.vocab_size,
        "multiple_of": model.intermediate_size,
        "ffn_dim_multiplier": 0.999 * model.intermediate_size / hidden,
        "norm_eps": model.rms_norm_eps,
        "rope_theta": model.rope_theta,
    }


def trainer_0_2(
    config: dict[str, Any], samples: Samples, weights: dict[str, Tensor], wrap: Callable
) -> Any:
    from torchtitan.config import JobConfig
    from torchtitan.models import llama3
    from torchtitan.models.llama3.model.args import RoPEScalingArgs
    from torchtitan.protocols.train_spec import register_train_spec
    from torchtitan.train import Trainer

    _, model = model_of(config)
    baseline = config["titan"]["baseline"]
    arguments = llama3.TransformerModelArgs(
        **arguments_0_2(model), rope_scaling_args=RoPEScalingArgs(**rope_scaling(model))
    )
    spec = replace(
        llama3.get_train_spec(),
        model_args={NAME: arguments},
        build_dataloader_fn=lambda **_: samples,
        build_tokenizer_fn=None,
        **({} if baseline == "T-amp" else {"parallelize_fn": fully_sharded_0_2}),
    )
    register_train_spec(NAME, spec)
    trainer = wrap(Trainer)(put(JobConfig(), sections_0_2(config)))
    if baseline != "T-amp":
        trainer.maybe_enable_amp = contextlib.nullcontext()  # FSDP casts
    load(trainer.model_parts[0], spec.state_dict_adapter(arguments, None).from_hf(weights))
    return trainer


def fully_sharded_0_2(model: nn.Module, parallel_dims: Any, job_config: Any) -> nn.Module:
    """What torchtitan 0.2 does on several GPUs, on a mesh of one: recomputation, compilation, FSDP
    in 16 bits."""
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.config import TORCH_DTYPE_MAP
    from torchtitan.models.llama3.infra import parallelize
    from torchtitan.tools.utils import device_type

    if job_config.activation_checkpoint.mode != "none":
        parallelize.apply_ac(
            model,
            job_config.activation_checkpoint,
            model_compile_enabled=job_config.compile.enable,
            op_sac_save_list=parallelize._op_sac_save_list,
            base_folder=job_config.job.dump_folder,
        )
    if job_config.compile.enable:
        parallelize.apply_compile(model, job_config.compile)
    parallelize.apply_fsdp(
        model,
        init_device_mesh(device_type, (1,), mesh_dim_names=("fsdp",)),
        param_dtype=TORCH_DTYPE_MAP[job_config.training.mixed_precision_param],
        reduce_dtype=torch.float32,
        pp_enabled=False,
        reshard_after_forward_policy="never",
    )
    return model


# torchtitan 0.3 -----------------------------------------------------------------------------------


def trainer_0_3(
    config: dict[str, Any], samples: Samples, weights: dict[str, Tensor], wrap: Callable
) -> Any:
    """torchtitan 0.3 with its defaults (always FSDP, fused q, k and v, chunked loss, CUDA graphs),
    except for attention by torch's SDPA, which it has for models without documents, and which is
    faster than its masks for whole rows."""
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed.activation_checkpoint import SelectiveAC
    from torchtitan.models import llama3
    from torchtitan.trainer import Trainer

    _, model = model_of(config)
    optimizer, titan = config["optimizer"], config["titan"]
    spec = replace(llama3.model_registry("8B"), model=config_0_3(model, config["data"]["seq_len"]))
    job = Trainer.Config(
        model_spec=spec,
        dump_folder=titan["folder"],
        optimizer=default_adamw(
            lr=optimizer["lr"],
            betas=tuple(optimizer["betas"]),
            eps=optimizer["eps"],
            weight_decay=optimizer["weight_decay"],
        ),
        training=TrainingConfig(
            local_batch_size=config["batch"]["micro_size"],
            global_batch_size=config["batch"]["global_size"],
            seq_len=config["data"]["seq_len"],
            max_norm=optimizer["clip_norm"],
            steps=config["train"]["steps"],
            mixed_precision_param=config["train"]["precision"],
            disable_cuda_graphs=not titan["cuda_graphs"],
        ),
        parallelism=ParallelismConfig(fsdp_reshard_after_forward="never"),
        activation_checkpoint=SelectiveAC.Config() if titan["baseline"] == "T-sac" else None,
        compile=CompileConfig(enable=titan["compile"]),
        loss=ChunkedLossWrapper.Config(
            loss_fn=CrossEntropyLoss.Config(global_vocab_size=model.vocab_size)
        ),
        tokenizer=SimpleNamespace(build=lambda **_: None),
        dataloader=SimpleNamespace(build=lambda **_: samples),
    )
    # needs a later torch than the rest of torchtitan
    if not hasattr(torch.distributed, "set_timeout"):
        from torchtitan.distributed import utils

        utils.set_pg_timeouts = lambda **_: None
    put(
        job,
        {"metrics": {"log_freq": 10**9}, "lr_scheduler": {"warmup_steps": 0, "decay_ratio": 0.0}},
    )
    trainer = wrap(Trainer)(job)
    load(trainer.model_parts[0], spec.state_dict_adapter(spec.model, None).from_hf(weights))
    return trainer


def config_0_3(model: Any, length: int) -> Any:
    """torchtitan 0.3's Llama3Model.Config for the sizes of `model`."""
    from torchtitan.models import llama3
    from torchtitan.models.common import ComplexRoPE
    from torchtitan.models.common.attention import ScaledDotProductAttention

    d = model.hidden_size
    config = llama3.llama3_configs["8B"]("flex")
    rope = ComplexRoPE.Config(
        dim=model.head_width,
        max_seq_len=length,
        theta=model.rope_theta,
        scaling="llama",
        **rope_scaling(model),
    )
    layers = llama3._build_llama3_layers(
        n_layers=model.num_hidden_layers,
        dim=d,
        n_heads=model.num_attention_heads,
        n_kv_heads=model.kv_heads,
        hidden_dim=model.intermediate_size,
        rope=rope,
        attn_backend="flex",
    )
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        layer.attention_norm.eps = layer.ffn_norm.eps = model.rms_norm_eps
    config.dim, config.vocab_size, config.layers = d, model.vocab_size, layers
    config.norm.normalized_shape, config.norm.eps = d, model.rms_norm_eps
    config.tok_embeddings.num_embeddings, config.tok_embeddings.embedding_dim = model.vocab_size, d
    config.lm_head.in_features, config.lm_head.out_features = d, model.vocab_size
    return config


def load(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Loads whole tensors into a model that may be compiled and sharded."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    parts = {}
    for name, own in model.state_dict().items():
        value = state[name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")]
        sharded = isinstance(own, DTensor)
        parts[name] = (
            distribute_tensor(value, own.device_mesh, own.placements) if sharded else value
        )
    model.load_state_dict(parts)
