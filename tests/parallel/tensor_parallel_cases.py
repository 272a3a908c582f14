"""For scripts of cases on several ranks, until they are tests (tests/ranks.py): compares, and prints what failed."""

import json
from typing import Any

import torch
from torch import Tensor

from meshtrain.mesh import Mesh
from tests.comparing import Created, small_llama

__all__ = ["Cases", "Created", "small_llama"]


class Cases:
    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.checked = 0
        self.failures: list[str] = []

    def same(self, found: Tensor, expected: Tensor, what: str) -> None:
        self.checked += 1
        if found.shape != expected.shape or not torch.allclose(found, expected, rtol=1e-12, atol=1e-12):
            self.failures.append(f"rank {self.mesh.rank}: {what}")

    def equal(self, found: Any, expected: Any, what: str) -> None:
        self.checked += 1
        if found != expected:
            self.failures.append(f"rank {self.mesh.rank}: {what}: {found} and not {expected}")

    def tell(self) -> None:
        """Prints one line for the test that started this job."""
        print(json.dumps({"checked": self.checked, "failures": self.failures}) + "\n", end="", flush=True)
