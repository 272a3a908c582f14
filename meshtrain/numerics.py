"""How exactly a run computes: what the YAML's `precision` and `deterministic` mean to torch."""

import hashlib
import os
import random

import numpy as np
import torch

PRECISIONS = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def compute_dtype(precision: str) -> torch.dtype:
    """The type in which blocks compute."""
    return PRECISIONS[precision]


def master_dtype(precision: str) -> torch.dtype:
    """The type in which parameters, gradients and optimizer states are kept and gradients are reduced."""
    return torch.float64 if precision == "float64" else torch.float32


def sum_dtype(device: torch.device) -> torch.dtype:
    """The type in which the squares of float32 gradients are summed for a norm, on a device."""
    if device.type != "cuda" or torch.version.hip:
        return torch.float64
    return sum_dtype_of(torch.cuda.get_device_capability(device))


def sum_dtype_of(capability: tuple[int, int]) -> torch.dtype:
    """float64 on NVIDIA GPUs that compute in it at half the rate of float32; on others, at a 32nd or 64th, float32.

    torch sums in blocks of 2**16 elements, and those sums once more: float32 then keeps about 6 digits of a norm.
    """
    return torch.float64 if capability in {(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)} else torch.float32


def cast(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Casts a model's real parameters and buffers in place: `Module.to` would take the imaginary part from others."""
    return model._apply(lambda x: x.to(dtype) if x.is_floating_point() else x)


def set_numerics(precision: str, deterministic: bool) -> None:
    """Sets torch's switches for this process.

    float32 means float32: TF32, which keeps 10 bits of the fraction, is off for products and convolutions.
    Deterministic kernels give a run on the same layout, machine and versions the same bits each time; an operation
    that has none raises RuntimeError.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = False  # picks kernels by a race, and so sometimes others
    if deterministic:
        # cuBLAS reads this when its first handle is made: two buffers of fixed size and no others.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)


def reseed(seed: int, step: int, index: int) -> None:
    """Seeds the random numbers of torch, numpy and Python for a step: a function of these three and of no history.

    So what a model or a data set draws is the same after a resume, and no generator's state has to be kept.

    Args:
        seed: of the run.
        step: counted from 1.
        index: of the rank among those that have different samples; ranks that share samples draw the same numbers.
    """
    drawn = int.from_bytes(hashlib.blake2b(f"{seed} {step} {index}".encode(), digest_size=8).digest())
    torch.manual_seed(drawn)
    np.random.seed(drawn % 2**32)
    random.seed(drawn)
