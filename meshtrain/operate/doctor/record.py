"""What the nodes tell each other, as frozen dataclasses; to JSON and back, checked, because it comes off a network."""

import types
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


class RecordError(ValueError):
    """What came over the network has not the form of what was asked for."""


@dataclass(frozen=True)
class Place:
    """Where and as whom a node goes to meet the others, as its command line or its launcher says.

    Attributes:
        launcher: "torchrun's options", "torchrun" (this is one of its workers), "srun" or "local".
        backend: torchrun's rendezvous backend: "c10d" or "static".
        address, port: of the endpoint.
        id: the job's rendezvous id.
        fewest, most: numbers of nodes.
        node_rank: of this node; None where the backend deals them out.
        processes: of this node: a number, "gpu", "cpu" or "auto".
        serves: whether this node serves the endpoint; None: it finds out as torchrun does.
        rank: of this very process where the launcher has numbered them already.
        expected: names of the nodes, where the launcher knows them.
    """

    launcher: str
    backend: str
    address: str
    port: int
    id: str
    fewest: int
    most: int
    node_rank: int | None = None
    processes: str = "1"
    serves: bool | None = None
    rank: int | None = None
    expected: tuple[str, ...] = ()

    @property
    def endpoint(self) -> str:
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"

    @property
    def nodes(self) -> str:
        """The number of nodes as torchrun's option has it: `2`, `2:4`."""
        return str(self.most) if self.fewest == self.most else f"{self.fewest}:{self.most}"


@dataclass(frozen=True)
class Interface:
    """A network interface; addresses with the length of their prefix (`10.0.0.1/24`)."""

    name: str
    addresses: tuple[str, ...]
    up: bool = True
    mbit: int | None = None  # the link's speed where the driver tells it


@dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi tells it; `throttled` is why its clocks are held down, empty where they are not."""

    index: int
    name: str
    uuid: str
    memory_gib: float
    used_gib: float
    driver: str
    throttled: str = ""


@dataclass(frozen=True)
class Port:
    """A port of an RDMA card: `mlx5_0:1`.

    Attributes:
        layer: "InfiniBand", "Ethernet" (RoCE), or another, which NCCL leaves out.
        gbit: its rate per second.
        driver: of the card: "mlx5_core", "efa"; empty where it cannot be seen.
        roce_v2: whether it has an address (GID) of RoCE v2.
    """

    name: str
    layer: str = "InfiniBand"
    active: bool = True
    gbit: float = 0.0
    driver: str = ""
    roce_v2: bool = False

    @property
    def of_nccl(self) -> bool:
        """Whether NCCL takes it without a plugin (src/transport/net_ib)."""
        return self.active and self.layer in ("InfiniBand", "Ethernet")


@dataclass(frozen=True)
class PathFacts:
    """A path that the config names, as one host sees it.

    Attributes:
        key: the config's key.
        path: absolute.
        writes: whether the job writes there, or reads.
        seen: the nearest folder above (or the path itself) that is there.
        problem: why it cannot be read or written; empty where it can.
        digest: of size and samples of what is read.
        token: the name of the file left beside it for the other hosts to see; empty where none could be.
        filesystem: the type of its file system.
    """

    key: str
    path: str
    writes: bool
    seen: str = ""
    problem: str = ""
    size: int | None = None
    digest: str = ""
    mib_per_s: float | None = None
    token: str = ""
    filesystem: str = ""
    free_gib: float | None = None


@dataclass(frozen=True)
class Host:
    """Everything that a host says of itself.

    Attributes:
        host: its name, as the kernel has it.
        ranks: of the job's processes that run on it.
        processes: how many the node was told to start.
        resolves: name -> addresses, for its own name and the endpoint's, as this host resolves them; none: it does not.
        slow_names: names whose look-up took longer than a second or two.
        route: its own address on the way to the endpoint (of the host that serves it: on the way to the others).
        variables: those of the environment that change how a job communicates or computes.
        nccl_conf: what NCCL reads from its files of settings for those that are not set.
        versions: of Python, libraries, kernel, driver.
        code: file -> digest.
        config: the resolved config, line by line; `config_error` where it is wrong.
        links: "NV2 0-1" and so on: pairs of GPUs that NVLink joins, where nvidia-smi tells.
        ports: of RDMA cards, those that are down too.
        verbs: whether a process can open one of these cards.
        gpudirect: by what network cards can read a GPU's memory, as far as can be seen; empty: by nothing.
        net_plugin: the file of a network's plugin that NCCL will load; empty: there is none.
    """

    host: str
    place: Place
    processes: int
    ranks: tuple[int, ...] = ()
    resolves: dict[str, tuple[str, ...]] | None = None
    slow_names: tuple[str, ...] = ()
    interfaces: tuple[Interface, ...] = ()
    route: str = ""
    variables: dict[str, str] | None = None
    nccl_conf: dict[str, str] | None = None
    versions: dict[str, str] | None = None
    code: dict[str, str] | None = None
    config: tuple[str, ...] = ()
    config_error: str = ""
    layout: dict[str, int] | None = None
    folder: str = ""
    paths: tuple[PathFacts, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    gpus_seen: int = 0
    links: tuple[str, ...] = ()
    ports: tuple[Port, ...] = ()
    verbs: bool = True
    gpudirect: str = ""
    net_plugin: str = ""
    cores: int = 1
    load: float = 0.0
    memory_gib: float = 0.0
    memory_free_gib: float = 0.0
    shared_memory_gib: float = 0.0
    locked_memory_kib: int | None = None  # None: no limit
    open_files: tuple[int, int] | None = None  # the soft limit and the hard one; below 0 there is none
    machine: str = ""  # differs between two starts of any two kernels
    port: int = 0  # where it listens for the others to try

    @property
    def rdma(self) -> tuple[Port, ...]:
        """The ports that NCCL takes without a plugin."""
        return tuple(port for port in self.ports if port.of_nccl) if self.verbs else ()

    @property
    def rdma_name(self) -> str:
        """`InfiniBand`, `RoCE`, or both; empty where there is none."""
        names = {"InfiniBand": "InfiniBand", "Ethernet": "RoCE"}
        return " and ".join(name for layer, name in names.items() if any(port.layer == layer for port in self.rdma))

    @property
    def efa(self) -> bool:
        """Whether it has cards of AWS, which NCCL knows by a plugin alone."""
        return any(port.driver == "efa" for port in self.ports)

    @property
    def settings(self) -> dict[str, str]:
        """The variables as NCCL has them."""
        return (self.nccl_conf or {}) | (self.variables or {})


@dataclass(frozen=True)
class Entry:
    """What the others need to know of a host: its open port, what that tells, addresses to try, files to look for."""

    host: str
    door: str
    port: int
    addresses: tuple[str, ...]
    tokens: tuple[str, ...]


@dataclass(frozen=True)
class Directory:
    """All nodes, in their order."""

    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Reach:
    """One host tries another's random port: `how` is "open", "refused", "silent", "unreachable", or who answered."""

    source: int
    target: int
    address: str
    port: int
    how: str


@dataclass(frozen=True)
class Visit:
    """What a node found when it looked at the others: the second thing that it tells."""

    reach: tuple[Reach, ...] = ()
    names: dict[str, tuple[str, ...]] | None = None  # of the other hosts -> addresses, as this host resolves them
    tokens: tuple[str, ...] = ()  # of the other hosts' files, those that this host sees
    blind: tuple[str, ...] = ()  # config keys of the folders in which it could not look


@dataclass(frozen=True)
class Stranger:
    """Somebody at the endpoint who is no doctor."""

    address: str
    what: str


@dataclass(frozen=True)
class Heard:
    """Another doctor whose call was heard, from whichever address, and where it goes."""

    host: str
    address: str
    place: Place


@dataclass(frozen=True)
class Attempt:
    """How a node failed to meet the others.

    Attributes:
        how: "unresolved", "refused", "silent", "unreachable", "stranger", "mute", "taken" or "left".
        detail: the error's text, who is there, or which process has the port.
        alive: whether the endpoint's host answered on another port; None where it was not asked.
        addresses: what the endpoint's name resolves to here.
        seconds: how long it tried.
    """

    how: str
    detail: str = ""
    alive: bool | None = None
    addresses: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class Timing:
    """One collective on the groups of an axis. Times in seconds, sizes in bytes, of the slowest group.

    Attributes:
        spread: the slowest repetition to the median one.
        bandwidth: bytes per second on the wire of each rank ("bus bandwidth", as nccl-tests counts it).
    """

    axes: str
    what: str
    ranks: int
    crosses: bool
    latency: float
    size: int
    seconds: float
    spread: float
    bandwidth: float


@dataclass(frozen=True)
class Link:
    """Sending between two ranks: bytes per second."""

    source: int
    target: int
    bandwidth: float


@dataclass(frozen=True)
class Timings:
    """What the workers measured.

    Attributes:
        backend: "gloo" or "nccl".
        compute: rank -> seconds of the same small computation on each.
        stuck: rank -> what it was doing when the time was up, or how it failed.
        skipped: why nothing was measured; empty where something was.
        left_out: collectives for which there was no time.
    """

    backend: str = ""
    timings: tuple[Timing, ...] = ()
    links: tuple[Link, ...] = ()
    compute: dict[str, float] | None = None
    stuck: dict[str, str] | None = None
    skipped: str = ""
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class Seen:
    """All that there is to judge, the same on every node that met the others. The first host serves the endpoint.

    Attributes:
        attempt: how this node failed to meet; None where it met. Then `hosts` is this node alone.
        clocks: seconds by which each host's clock is ahead of the first one's, and the error; None: not measured.
        visits: in the order of `hosts`; None where a node fell silent.
        waited: seconds until the last node came, or until the waiting was given up.
    """

    hosts: tuple[Host, ...]
    attempt: Attempt | None = None
    strangers: tuple[Stranger, ...] = ()
    waited: float = 0.0
    clocks: tuple[tuple[float, float] | None, ...] = ()
    visits: tuple[Visit | None, ...] = ()
    heard: tuple[Heard, ...] = ()  # doctors nearby
    silent: tuple[str, ...] = ()  # hosts that came and then told nothing
    timings: Timings | None = None


def to_json(value: Any) -> dict[str, Any]:
    """A record as what `json` can write."""
    return asdict(value)


def from_json(cls: type[T], found: Any, where: str = "") -> T:
    """The record that `to_json` gave, after a journey.

    Raises:
        RecordError: a field is missing, unknown, or of another type; names it.
    """
    return _read(cls, found, where or cls.__name__)


def _read(kind: Any, found: Any, where: str) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if found is None and type(None) in inner:
            return None
        return _read(next(one for one in inner if one is not type(None)), found, where)
    if origin is tuple:
        return _read_tuple(inner, found, where)
    if origin is dict:
        if not isinstance(found, Mapping):
            raise RecordError(f"{where}: expected an object, found {_short(found)}")
        return {str(name): _read(inner[1], value, f"{where}.{name}") for name, value in found.items()}
    if hasattr(kind, "__dataclass_fields__"):
        return _read_record(kind, found, where)
    if kind is float and isinstance(found, int) and not isinstance(found, bool):
        return float(found)
    if not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool):
        raise RecordError(f"{where}: expected {kind.__name__}, found {_short(found)}")
    return found


def _read_tuple(inner: tuple[Any, ...], found: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(found, list | tuple):
        raise RecordError(f"{where}: expected a list, found {_short(found)}")
    if inner[-1] is Ellipsis:
        return tuple(_read(inner[0], one, f"{where}[{i}]") for i, one in enumerate(found))
    if len(found) != len(inner):
        raise RecordError(f"{where}: expected {len(inner)} items, found {len(found)}")
    return tuple(_read(kind, one, f"{where}[{i}]") for i, (kind, one) in enumerate(zip(inner, found, strict=True)))


def _read_record(cls: Any, found: Any, where: str) -> Any:
    if not isinstance(found, Mapping):
        raise RecordError(f"{where}: expected an object, found {_short(found)}")
    hints = get_type_hints(cls)
    names = {one.name for one in fields(cls)}
    if set(found) != names:
        raise RecordError(f"{where}: has not the fields of {cls.__name__}: {', '.join(sorted(names ^ set(found)))}")
    return cls(**{name: _read(hints[name], found[name], f"{where}.{name}") for name in names})


def _short(found: Any) -> str:
    text = repr(found)
    return text if len(text) <= 40 else f"{text[:37]}..."
