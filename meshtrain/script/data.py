"""Whether all ranks have the same data set: a script makes it on every rank, and one that is drawn
without a seed is another on each."""

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshtrain.data.loader import Indexable
from meshtrain.job.consistency import Fingerprint
from meshtrain.parallel.torch_private import tree_leaves

REMEDY = (
    "Each rank takes its share of one data set: seed what makes it, or splits it, alike on all "
    "ranks (torch.manual_seed), and let an item depend on its index alone"
)


def data_fingerprint(dataset: Indexable) -> Fingerprint:
    """The length of a data set that is not empty, and a digest of its first sample."""
    values = {
        "len(dataset)": str(len(dataset)),
        "a digest of dataset[0]": _digest(dataset[0]),
    }
    return Fingerprint("the data set of run.steps", values, REMEDY)


def _digest(sample: Any) -> str:
    """Of the numbers and texts in a sample; objects of other kinds count by their type."""
    digest = hashlib.sha256()
    for leaf in tree_leaves(sample):
        digest.update(type(leaf).__name__.encode())
        if isinstance(leaf, Tensor):
            # As bytes, because numpy has not every type of torch.
            flat = leaf.detach().cpu().contiguous().flatten()
            digest.update(flat.view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, np.ndarray | np.generic):
            digest.update(leaf.tobytes())
        elif isinstance(leaf, bool | int | float | complex | str | bytes):
            digest.update(repr(leaf).encode())
    return digest.hexdigest()[:12]
