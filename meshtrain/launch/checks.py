"""Whether a config fits the nodes that are asked for, and whether its files can be read and written."""

import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshtrain.config import Config
from meshtrain.config.layout_advice import host_warnings, resolve
from meshtrain.data.order import describe_batch
from meshtrain.doctor.files import named_paths
from meshtrain.doctor.host import filesystem
from meshtrain.errors import InputError, plural
from meshtrain.launch.request import Request
from meshtrain.layout import DATA_AXES, Layout, LayoutError

IN_MEMORY = ("tmpfs", "ramfs")  # each host has its own


@dataclass(frozen=True)
class ConfigOnNodes:
    """A config that fits: `layout` is placed on the nodes; `notes` are what may be wrong and need not be."""

    config: Config
    layout: Layout
    notes: tuple[str, ...] = ()

    @property
    def about(self) -> list[str]:
        """Lines for people."""
        batch, nodes = self.config.batch, len(self.layout.hosts)
        per_node = self.layout.world_size // nodes
        return [
            f"{self.config.name} on {plural(nodes, 'node')} x {plural(per_node, 'GPU')}: layout {self.layout}",
            describe_batch(batch.global_size, batch.micro_size, self.layout.size(*DATA_AXES)),
        ]


def fit_on_nodes(name: str, overrides: Sequence[str], request: Request) -> ConfigOnNodes:
    """A config, which fits the nodes of a request. Raises InputError or LayoutError: it does not, or is wrong."""
    nodes, gpus = request.nodes, request.gpus_per_node
    config = Config.load(name, overrides, for_training=True)
    try:
        layout = resolve(config.layout, nodes * gpus)
    except LayoutError as error:
        raise InputError(f"{error}. {nodes_that_fit(config.layout, nodes, gpus)}") from error
    config = Config.load(name, overrides, for_training=True, world_size=nodes * gpus)  # what was left open
    placed = layout.on_hosts([gpus] * nodes, [f"node {i}" for i in range(nodes)])
    crossing = host_warnings(placed)  # of a job that runs already; this one can still be asked for in another way
    if crossing:
        raise InputError(" ".join(crossing))
    _check_writable(config)
    paths = {entry.key: entry.path for entry in named_paths(config)} | {"the config": config.file}
    paths |= {} if request.activate is None else {"the environment": request.activate}
    return ConfigOnNodes(config, placed, tuple(_notes(paths)) if nodes > 1 else ())


def nodes_that_fit(sizes: Mapping[str, int], nodes: int, gpus: int) -> str:
    """Numbers of nodes that a layout fits, nearest to the number asked for, as a sentence."""
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if -1 in sizes.values():
        step = fixed // math.gcd(fixed, gpus)
        below = nodes // step * step
        counts = [str(count) for count in (below, below + step) if count]
        return f"With {gpus} GPUs per node: --nodes {' or --nodes '.join(counts)}"
    if fixed % gpus == 0:
        return f"With {gpus} GPUs per node: --nodes {fixed // gpus}"
    per_node = max(count for count in range(1, gpus + 1) if fixed % count == 0)
    return f"{fixed} processes are no multiple of {gpus}: --nodes {fixed // per_node} --gpus-per-node {per_node}"


def _check_writable(config: Config) -> None:
    """Refuses folders that could not be made from here, which would only show when the job has left the queue."""
    for entry in named_paths(config):
        if not entry.writes:
            continue
        ancestor = next(path for path in (Path(entry.path), *Path(entry.path).parents) if path.exists())
        if not ancestor.is_dir() or not os.access(ancestor, os.W_OK | os.X_OK):
            problem = "may not be written to by this user" if ancestor.is_dir() else "is no folder"
            raise InputError(
                f"{entry.key} is {entry.path}, and {ancestor} {problem}: name another with {entry.key}=FOLDER"
            )


def _notes(paths: Mapping[str, str]) -> list[str]:
    """Of which paths each node probably has its own."""
    notes = []
    for key, name in paths.items():
        path = Path(name).absolute()
        ancestor = next(candidate for candidate in (path, *path.parents) if candidate.exists())
        if filesystem(str(ancestor)) in IN_MEMORY or Path(tempfile.gettempdir()) in (ancestor, *ancestor.parents):
            notes.append(f"{key} is {path}, and of such a folder each node has its own, as a rule")
    return notes
