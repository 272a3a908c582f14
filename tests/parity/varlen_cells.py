"""`train_cells.py` on CPUs with variable-length attention, in all dtypes."""

import runpy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn

import tests.varlen_on_cpu  # noqa: F401  (its operators)
from meshtrain import attention
from meshtrain.attention import AttentionContext


def to(self: AttentionContext, *args: Any, **kwargs: Any) -> Any:
    """Moves documents to the meta device, without values: building a mask from them would fail."""
    moved = plain_to(self, *args, **kwargs)
    return moved if moved.kernel is None else AttentionContext(moved.documents.to("meta"), moved.lengths, moved.kernel)


plain_to, AttentionContext.to = AttentionContext.to, to  # type: ignore[method-assign]
attention.VARLEN_TYPES = (*attention.VARLEN_TYPES, torch.float64)
attention.varlen_kernel = lambda *_: partial(varlen_attn, enable_gqa=True)
runpy.run_path(str(Path(__file__).with_name("train_cells.py")), run_name="__main__")
