"""The files of a checkpoint as they are asked for: opened once, checked against the manifest, few at a time."""

import resource
from collections import OrderedDict
from pathlib import Path
from types import TracebackType

from meshtrain.checkpoint.manifest import Manifest, file_of
from meshtrain.checkpoint.placement import shape_of
from meshtrain.checkpoint.shards import Shard
from meshtrain.cuts import Part
from meshtrain.errors import DamagedError

# A tensor may lie in hundreds of files, and to open one again takes 50 ms of arithmetic on its checksums.
MOST_OPEN = 1024


class Opened:
    """The files of one checkpoint. Those that were used last stay open, with their headers."""

    def __init__(self, checkpoint: Path, manifest: Manifest) -> None:
        self.checkpoint = checkpoint
        self.manifest = manifest
        self._open: OrderedDict[int, Shard] = OrderedDict()  # by rank, the last used one last

    def holding(self, name: str, rank: int, piece: Part) -> Shard:
        """The file of a rank, which holds this piece of a tensor as its entry of that name (see placement.pieces).

        Raises:
            DamagedError: the file is not what was written, or holds something else.
        """
        shard = self._shard(rank)
        entry, dtype, shape = shard.entries.get(name), self.manifest.tensors[name].dtype, shape_of(piece)
        if entry is None or (entry.dtype, entry.shape) != (dtype, shape):
            here = "is not in the file" if entry is None else f"is {entry.dtype} {list(entry.shape)}"
            raise DamagedError(shard.path, f"{here}, and by the manifest it is {dtype} {list(shape)}", name)
        return shard

    def _shard(self, rank: int) -> Shard:
        if rank not in self._open:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]  # a job raises it when it starts
            if len(self._open) >= (MOST_OPEN if limit == resource.RLIM_INFINITY else min(MOST_OPEN, limit // 2)):
                self._open.popitem(last=False)[1].close()
            name = file_of(rank)
            self._open[rank] = Shard(self.checkpoint / name, self.manifest.files[name])
        self._open.move_to_end(rank)
        return self._open[rank]

    def __enter__(self) -> "Opened":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._open:
            self._open.popitem()[1].close()
