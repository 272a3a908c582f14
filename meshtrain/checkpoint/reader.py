"""Reads any part of a checkpoint's tensors, whatever layout wrote it; takes nothing that its checksums do not prove."""

import torch
from torch import Tensor

from meshtrain.checkpoint.opened import Opened
from meshtrain.checkpoint.placement import overlap, pieces, shape_of, within
from meshtrain.cuts import Part
from meshtrain.huggingface import DTYPES


def read_part(files: Opened, name: str, wanted: Part) -> Tensor:
    """A part of a tensor in the type in which it is stored; a scalar counts as one dim of size 1.

    Raises:
        DamagedError: a file that holds some of it is not what was written; names the file and the tensor.
    """
    placement = files.manifest.tensors[name]
    kind = DTYPES[placement.dtype]
    found = torch.empty(shape_of(wanted), dtype=kind)
    for rank, piece in pieces(placement, files.manifest.layout, wanted):
        both = overlap(piece, wanted)
        rows, *rest = within(both, piece)
        data = files.holding(name, rank, piece).read(name, rows)
        values = torch.frombuffer(data, dtype=kind).view(-1, *shape_of(piece)[1:])
        found[within(both, wanted)] = values[(slice(None), *rest)]
    return found
