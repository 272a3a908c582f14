"""Records that the nodes exchange, as frozen dataclasses; to JSON and back, checked, as they come
from a network."""

import types
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from meshtrain.metrics.nvml import Gpu

T = TypeVar("T")


class RecordError(ValueError):
    """Data from the network does not have the expected form."""


@dataclass(frozen=True)
class Place:
    """Where, and as which node, a node meets the others, from its command line or its launcher."""

    # "torchrun's options", "torchrun" (this is one of its workers), "srun" or "local"
    launcher: str
    backend: str  # of torchrun's rendezvous: "c10d" or "static"
    address: str
    port: int
    id: str
    fewest: int  # nodes
    most: int
    node_rank: int | None = None  # None where the backend assigns it
    processes: str = "1"  # of this node: a number, "gpu", "cpu" or "auto"
    # whether this node serves the endpoint; None: decided as torchrun does
    serves: bool | None = None
    # of this node's processes, if the launcher has already assigned them
    ranks: tuple[int, ...] = ()
    expected: tuple[str, ...] = ()  # names of the nodes, if the launcher knows them

    @classmethod
    def alone(cls, processes: str, backend: str = "c10d") -> "Place":
        """Of a node that meets no other."""
        return cls(
            launcher="local",
            backend=backend,
            address="localhost",
            port=0,
            id="none",
            fewest=1,
            most=1,
            node_rank=0,
            processes=processes,
            serves=True,
        )

    @property
    def by_options(self) -> bool:
        return self.launcher == "torchrun's options"

    @property
    def endpoint(self) -> str:
        address = f"[{self.address}]" if ":" in self.address else self.address
        return f"{address}:{self.port}"

    @property
    def nodes(self) -> str:
        return str(self.most) if self.fewest == self.most else f"{self.fewest}:{self.most}"


@dataclass(frozen=True)
class Interface:
    name: str
    addresses: tuple[str, ...]


@dataclass(frozen=True)
class Port:
    """A port of an RDMA card, `mlx5_0:1`; `roce_v2`: whether it has an address (GID) of RoCE v2."""

    name: str
    layer: str = "InfiniBand"  # or "Ethernet" (RoCE), or another one, which NCCL ignores
    active: bool = True
    gbit: float = 0.0
    driver: str = ""  # "mlx5_core", "efa"; empty if unknown
    roce_v2: bool = False

    @property
    def of_nccl(self) -> bool:
        """Whether NCCL uses it without a plugin (src/transport/net_ib)."""
        return self.active and self.layer in ("InfiniBand", "Ethernet")


@dataclass(frozen=True)
class PathFacts:
    """A path that the config names, as one host sees it; absolute."""

    key: str
    path: str
    writes: bool  # whether the job writes there; otherwise it reads
    seen: str = ""  # the path itself or its nearest parent that exists
    problem: str = ""  # why it cannot be read or written
    size: int | None = None
    digest: str = ""  # of the size and of samples of the contents
    mib_per_s: float | None = None
    token: str = ""  # the name of the file left there for the other hosts to see
    filesystem: str = ""
    free_gib: float | None = None


@dataclass(frozen=True)
class Host:
    """All that a host reports about itself. None, empty or 0 where unknown."""

    host: str  # its name, as the kernel reports it
    place: Place
    processes: int  # how many the node was told to start
    ranks: tuple[int, ...] = ()
    # its own name and the endpoint's -> their addresses here
    resolves: dict[str, tuple[str, ...]] = field(default_factory=dict)
    slow_names: tuple[str, ...] = ()  # names whose resolution took seconds
    interfaces: tuple[Interface, ...] = ()
    route: str = ""  # its own address on the route to the endpoint, or from there to the others
    variables: dict[str, str] = field(
        default_factory=dict
    )  # those that change how a job communicates or computes
    # settings that NCCL reads from its files for variables not set
    nccl_conf: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    code: dict[str, str] = field(default_factory=dict)  # file -> digest
    config: tuple[str, ...] = ()  # resolved, line by line
    config_error: str = ""
    layout: dict[str, int] | None = None
    folder: str = ""
    paths: tuple[PathFacts, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    gpus_seen: int = 0  # by torch
    ports: tuple[Port, ...] = ()  # of RDMA cards, including those that are down
    verbs: bool = True  # whether a process can open one of these cards
    net_plugin: str = ""  # the file of the network plugin that NCCL will load
    cores: int = 1
    load: float = 0.0
    memory_gib: float = 0.0
    memory_free_gib: float = 0.0
    shared_memory_gib: float = 0.0
    locked_memory_kib: int | None = None  # None: no limit
    open_files: tuple[int, int] | None = None  # the soft and the hard limit; below 0: no limit
    machine: str = ""  # the kernel's boot id, unique to each boot of each machine
    port: int = 0  # where it listens for the others to try

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(address for interface in self.interfaces for address in interface.addresses)

    @property
    def rdma(self) -> tuple[Port, ...]:
        return tuple(port for port in self.ports if port.of_nccl) if self.verbs else ()

    @property
    def rdma_name(self) -> str:
        """`InfiniBand`, `RoCE`, or both; empty if it has neither."""
        names = {"InfiniBand": "InfiniBand", "Ethernet": "RoCE"}
        layers = {port.layer for port in self.rdma}
        return " and ".join(name for layer, name in names.items() if layer in layers)

    @property
    def efa(self) -> bool:
        """Whether it has AWS's cards (EFA), which NCCL supports only through a plugin."""
        return any(port.driver == "efa" for port in self.ports)

    @property
    def settings(self) -> dict[str, str]:
        return self.nccl_conf | self.variables


@dataclass(frozen=True)
class PeerEntry:
    """What the others need to know about a host: its probe's port and answer, addresses to try,
    files to look for."""

    number: int  # of the node's keys on the board
    host: str
    ranks: tuple[int, ...]
    probe: str
    port: int
    addresses: tuple[str, ...]
    tokens: tuple[str, ...]


@dataclass(frozen=True)
class PortCheck:
    """A try of another host's random port; `how`: "open", "refused", "silent", "unreachable", or
    who answered."""

    source: int
    target: int
    address: str
    port: int
    how: str


@dataclass(frozen=True)
class PeerChecks:
    """What a node finds when it checks the others: its second message to the leader."""

    reach: tuple[PortCheck, ...] = ()
    # of the other hosts -> addresses, as this host resolves them
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    tokens: tuple[str, ...] = ()  # the other hosts' files that this host sees
    blind: tuple[str, ...] = ()  # config keys of the folders in which it could not look
    # seconds by which it is ahead of the leader's, and the error
    clock: tuple[float, float] | None = None


@dataclass(frozen=True)
class JoinFailure:
    how: str  # "unresolved", "refused", "silent", "unreachable", "stranger", "taken" or "left"
    detail: str = ""  # the error's text, who is there, or which process has the port
    # whether the endpoint's host answered on another port; None: not tried
    alive: bool | None = None
    addresses: tuple[str, ...] = ()  # to which the endpoint's name resolves
    seconds: float = 0.0


@dataclass(frozen=True)
class Timing:
    """One collective on the slowest group of an axis. Times in seconds, sizes in bytes."""

    axes: str
    what: str
    ranks: int
    hosts: int  # of a group
    crosses: bool
    latency: float
    size: int
    seconds: float
    fixed: float  # the part of `seconds` that a smaller size takes as well
    spread: float  # ratio of the slowest repetition to the median one
    # bytes per second on the wire of each rank ("bus bandwidth", as nccl-tests counts it)
    bandwidth: float


@dataclass(frozen=True)
class Link:
    """Bandwidth between two ranks in bytes per second."""

    source: int
    target: int
    bandwidth: float


@dataclass(frozen=True)
class Timings:
    backend: str = ""
    timings: tuple[Timing, ...] = ()
    links: tuple[Link, ...] = ()
    compute: dict[str, float] = field(
        default_factory=dict
    )  # rank -> seconds of the same small computation on each
    # rank -> what it was doing when time ran out, or how it failed
    stuck: dict[str, str] = field(default_factory=dict)
    skipped: str = ""  # why nothing was measured
    left_out: tuple[str, ...] = ()  # collectives for which there was no time
    # from NCCL's log: "NET/IB : Using ..." and "via P2P/CUMEM", each once
    transport: tuple[str, ...] = ()


@dataclass(frozen=True)
class ClusterFacts:
    """All facts to judge; the first host serves the endpoint."""

    hosts: tuple[Host, ...]
    # how this node failed to join; `hosts` is then this node alone
    attempt: JoinFailure | None = None
    strangers: tuple[str, ...] = ()  # who else uses the endpoint's store
    waited: float = 0.0  # seconds until the last node came, or until the wait was given up
    # seconds ahead of the first host's, and the error
    clocks: tuple[tuple[float, float] | None, ...] = ()
    # in the order of `hosts`; None if a node fell silent
    visits: tuple[PeerChecks | None, ...] = ()
    silent: tuple[str, ...] = ()  # hosts that came and then reported nothing
    timings: Timings | None = None

    @property
    def labels(self) -> list[str]:
        """The hosts' names; equal names are told apart by the node's number."""
        names = [host.host for host in self.hosts]
        counts = Counter(names)
        labels = []
        for i, name in enumerate(names):
            labels.append(name if counts[name] == 1 else f"{name} (node {i})")
        return labels

    @property
    def labelled(self) -> list[tuple[str, Host]]:
        return list(zip(self.labels, self.hosts, strict=True))

    @property
    def layout(self) -> dict[str, int] | None:
        """The sizes of the config's axes; None without a config that could be read."""
        for host in self.hosts:
            if host.layout is not None:
                return host.layout
        return None

    @property
    def several_machines(self) -> bool:
        return len({(host.machine, host.host, host.addresses) for host in self.hosts}) > 1


to_json = asdict  # a record as values that `json` can write


def from_json(cls: type[T], value: Any, path: str = "") -> T:
    """The record, or tuple of records, from the output of `to_json`. Raises RecordError: names an
    invalid field."""
    try:
        return _read(cls, value, path or cls.__name__)
    except OverflowError as error:  # an integer too large for a float
        raise RecordError(f"{path or cls.__name__}: {error}") from error


def _read(kind: Any, value: Any, path: str) -> Any:
    """A value of a type: a plain one, a record, or a tuple or dict of such, or one of them and
    None."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return None if value is None else _read(inner[0], value, path)
    if origin is tuple and isinstance(value, list | tuple):
        return _read_tuple(kind, value, path)
    if origin is dict and isinstance(value, Mapping):
        return {str(name): _read(inner[1], item, f"{path}.{name}") for name, item in value.items()}
    if is_dataclass(kind) and isinstance(value, Mapping):
        return _read_record(kind, value, path)
    if kind is float and type(value) is int:
        return float(value)
    # For Python, True is an int.
    mistaken = isinstance(value, bool) and kind is not bool
    if origin is None and isinstance(value, kind) and not mistaken:
        return value
    raise _wrong(kind, value, path)


def _read_tuple(kind: Any, values: Sequence[Any], path: str) -> tuple[Any, ...]:
    kinds = get_args(kind)
    if kinds[-1] is Ellipsis:
        kinds = kinds[:1] * len(values)
    if len(kinds) != len(values):
        raise _wrong(kind, values, path)
    items = []
    for i, (item_kind, value) in enumerate(zip(kinds, values, strict=True)):
        items.append(_read(item_kind, value, f"{path}[{i}]"))
    return tuple(items)


def _read_record(kind: Any, values: Mapping[Any, Any], path: str) -> Any:
    hints = get_type_hints(kind)
    wrong = set(hints) ^ set(map(str, values))
    if wrong:
        names = ", ".join(sorted(wrong))
        raise RecordError(f"{path}: has not the fields of {kind.__name__}: {names}"[:400])
    return kind(
        **{name: _read(hint, values[name], f"{path}.{name}") for name, hint in hints.items()}
    )


def _wrong(kind: Any, value: Any, path: str) -> RecordError:
    name = getattr(kind, "__name__", kind)
    return RecordError(f"{path}: expected {name}, found {repr(value)[:40]}")
