"""By what data goes from GPU to GPU, for hosts that are made up, and what NCCL finds on a host."""

from dataclasses import replace
from pathlib import Path

import pytest

from meshtrain.operate.doctor import machine, nccl
from meshtrain.operate.doctor.nccl import gpudirect, library_cache, net_plugin, settings
from meshtrain.operate.doctor.record import Host, Interface, Place, Port
from meshtrain.operate.doctor.transport import slow_switches, transport

LO, ETH0 = Interface("lo", ("127.0.0.1/8",)), Interface("eth0", ("10.0.0.1/24",))
PCIE = "PCIe from GPU to GPU where the machine allows it (NCCL_P2P_LEVEL says how far apart), or "
NETWORK = "the network between hosts, because of "
SHARED, SOCKETS = PCIE + "shared memory", "TCP sockets on eth0"
DIRECT = "InfiniBand with GPUDirect by DMA-BUF if the cards' driver has it, as far apart as NCCL_NET_GDR_LEVEL allows"
OFI = "/opt/ofi/lib/libnccl-net.so"
PLUGIN = f"what the plugin {OFI} offers, if it loads (NCCL_NET_PLUGIN=none switches it off)"
ROCE, EFA = Port("mlx5_1:1", "Ethernet", roce_v2=True), Port("rdmap1:1", "Unknown", driver="efa")
NO_EFA = ", because EFA is by the plugin aws-ofi-nccl alone, and there is none"
NVLINK = "NVLink (NCCL_P2P_DISABLE, NCCL_P2P_LEVEL switch it off)"


def gpu_host(**values: object) -> Host:
    place = Place("torchrun's options", "c10d", "a", 1, "job", 2, 2)
    return replace(Host("a", place, 8, gpus_seen=8, interfaces=(LO, ETH0)), **values)  # type: ignore[arg-type]


def nvlink(**variables: str) -> Host:
    return gpu_host(links=("NV12 0-1",), variables=variables)


def infiniband(direct: str = "", plugin: str = "", **variables: str) -> Host:
    return gpu_host(ports=(Port("mlx5_0:1"),), gpudirect=direct, net_plugin=plugin, variables=variables)


@pytest.mark.parametrize(
    ("host", "inside", "between"),
    [
        (gpu_host(), SHARED, SOCKETS),
        (nvlink(), NVLINK, SOCKETS),
        (nvlink(NCCL_P2P_LEVEL="PIX"), NVLINK, SOCKETS),
        (nvlink(NCCL_P2P_LEVEL="loc"), NVLINK, SOCKETS),
        (nvlink(NCCL_P2P_DISABLE="2"), NVLINK, SOCKETS),
        (
            nvlink(NCCL_P2P_DISABLE="1"),
            "shared memory, because of NCCL_P2P_DISABLE=1",
            SOCKETS,
        ),
        (
            nvlink(NCCL_P2P_LEVEL="LOC"),
            "shared memory, because of NCCL_P2P_LEVEL=LOC",
            SOCKETS,
        ),
        (
            gpu_host(nccl_conf={"NCCL_P2P_LEVEL": "0"}),
            "shared memory, because of NCCL_P2P_LEVEL=0",
            SOCKETS,
        ),
        (
            gpu_host(variables={"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}),
            NETWORK + "NCCL_SHM_DISABLE=1 and NCCL_P2P_DISABLE=1",
            SOCKETS,
        ),
        (
            gpu_host(variables={"NCCL_SHM_DISABLE": "1"}),
            PCIE + "the network between hosts, because of NCCL_SHM_DISABLE=1",
            SOCKETS,
        ),
        (infiniband("DMA-BUF"), SHARED, DIRECT),
        (infiniband("DMA-BUF", NCCL_NET_GDR_LEVEL="PHB", NCCL_NET="IB"), SHARED, DIRECT),
        (infiniband("DMA-BUF", NCCL_IB_DISABLE="true"), SHARED, DIRECT),
        (infiniband(), SHARED, "InfiniBand, as far as can be seen without GPUDirect"),
        (
            infiniband("DMA-BUF", NCCL_NET_GDR_LEVEL="LOC"),
            SHARED,
            "InfiniBand without GPUDirect, because of NCCL_NET_GDR_LEVEL=LOC",
        ),
        (infiniband("DMA-BUF", NCCL_IB_DISABLE="1"), SHARED, SOCKETS + ", because of NCCL_IB_DISABLE=1"),
        (infiniband("DMA-BUF", NCCL_NET="Socket"), SHARED, SOCKETS + ", because of NCCL_NET=Socket"),
        (infiniband("DMA-BUF", OFI, NCCL_NET="Socket"), SHARED, SOCKETS + ", because of NCCL_NET=Socket"),
        (infiniband("", OFI), SHARED, PLUGIN),
        (gpu_host(ports=(ROCE,), gpudirect="DMA-BUF"), SHARED, DIRECT.replace("InfiniBand", "RoCE")),
        (
            gpu_host(ports=(ROCE, Port("mlx5_0:1"))),
            SHARED,
            "InfiniBand and RoCE, as far as can be seen without GPUDirect",
        ),
        (
            gpu_host(ports=(ROCE,), variables={"NCCL_IB_DISABLE": "1"}),
            SHARED,
            SOCKETS + ", because of NCCL_IB_DISABLE=1",
        ),
        (gpu_host(ports=(replace(ROCE, active=False),)), SHARED, SOCKETS),
        (gpu_host(ports=(ROCE,), verbs=False), SHARED, SOCKETS),
        (gpu_host(ports=(EFA,)), SHARED, SOCKETS + NO_EFA),
        (gpu_host(ports=(EFA,), net_plugin=OFI), SHARED, PLUGIN),
        (gpu_host(net_plugin=OFI, variables={"NCCL_NET": "AWS Libfabric"}), SHARED, PLUGIN),
        (
            infiniband("DMA-BUF", NCCL_NET="AWS Libfabric"),
            SHARED,
            "nothing, because of NCCL_NET=AWS Libfabric, which is a plugin's, and there is none",
        ),
    ],
)
def test_the_transport_that_nccl_takes(host: Host, inside: str, between: str) -> None:
    assert transport([host, host]) == [f"inside of a host: {inside}", f"between hosts: {between}"]
    assert transport([host]) == [f"inside of a host: {inside}"]


def test_hosts_that_differ_in_transport() -> None:
    found = transport([infiniband(NCCL_NET_GDR_LEVEL="0"), gpu_host()])
    ways = "InfiniBand without GPUDirect, because of NCCL_NET_GDR_LEVEL=0 or TCP sockets on eth0"
    assert found[1] == f"between hosts: {ways} (the hosts differ: NCCL takes what all have)"


def test_what_makes_a_job_slower_is_named_with_its_value() -> None:
    usual = {"NCCL_P2P_LEVEL": "NVL", "NCCL_NET_GDR_LEVEL": "SYS", "NCCL_IB_DISABLE": "0", "NCCL_NET": "IB"}
    assert slow_switches(infiniband(**usual)) == {}
    slow = {"NCCL_P2P_LEVEL": "LOC", "NCCL_NET_GDR_LEVEL": "LOC", "NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket"}
    named = ["NCCL_P2P_LEVEL=LOC", "NCCL_IB_DISABLE=1", "NCCL_NET=Socket", "NCCL_NET_GDR_LEVEL=LOC"]
    assert list(slow_switches(infiniband(**slow))) == named
    assert list(slow_switches(gpu_host(variables=slow))) == named[:1], "there is nothing else than sockets"
    assert list(slow_switches(gpu_host(net_plugin=OFI, nccl_conf=slow))) == [named[0], *named[2:]]
    assert slow_switches(replace(infiniband(**slow), gpus_seen=0)) == {}, "gloo does not look at them"


# What is found on a host --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("modules", "kernel", "driver", "variables", "found"),
    [
        ("nvidia_peermem 16384 0 - Live\n", "5.4.0-150", "NVIDIA UNIX x86_64 Kernel Module", {}, "nvidia_peermem"),
        ("nv_peer_mem 16384 0 - Live\n", "4.18.0", "", {}, "nvidia_peermem"),
        (
            "nvidia_peermem 1 0\n",
            "5.15.0-91-generic",
            "NVIDIA UNIX Open Kernel Module for x86_64  570.1",
            {},
            "DMA-BUF",
        ),
        ("nvidia 1 0\n", "5.15.0", "NVIDIA UNIX Open Kernel Module", {"NCCL_DMABUF_ENABLE": "0"}, ""),
        ("nvidia 1 0\n", "5.10.0", "NVIDIA UNIX Open Kernel Module for x86_64", {}, ""),
        ("nvidia 1 0\n", "6.1.0", "NVIDIA UNIX x86_64 Kernel Module  535.1", {}, ""),
    ],
)
def test_by_what_network_cards_read_a_gpus_memory(
    tmp_path: Path, modules: str, kernel: str, driver: str, variables: dict[str, str], found: str
) -> None:
    for name, text in {"modules": modules, "sys/kernel/osrelease": kernel, "driver/nvidia/version": driver}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert gpudirect(variables, tmp_path) == found


def test_a_host_without_a_driver_has_no_gpudirect(tmp_path: Path) -> None:
    assert gpudirect({}, tmp_path) == ""


def test_the_plugin_of_a_network(tmp_path: Path) -> None:
    mine, whole = tmp_path / "libnccl-net-mine.so", tmp_path / "odd [1]/x.so"
    whole.parent.mkdir()
    for file in (mine, whole):
        file.touch()
    cached = {"libnccl-net.so": "/lib/libnccl-net.so", "libnccl-net-ofi.so": "/lib/libnccl-net-ofi.so"}
    path = {"LD_LIBRARY_PATH": f":/:/**:{whole.parent}:{tmp_path}"}
    assert net_plugin({}, {}) == ""
    assert net_plugin({}, cached) == "/lib/libnccl-net.so"
    for asked, found in {
        "none": "", "NONE": "", "ofi": "/lib/libnccl-net-ofi.so", "mine": str(mine), "libnccl-net-mine.so": str(mine),
        "gone,mine": str(mine), str(whole): str(whole), "x.so": str(whole), "gone": "", "/gone/x.so": "",
    }.items():  # fmt: skip
        assert net_plugin(path | {"NCCL_NET_PLUGIN": asked}, cached) == found, asked


def test_what_the_loader_knows() -> None:
    known = library_cache()
    assert known["libc.so.6"].startswith("/")


def test_nccl_reads_files_of_settings_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    users, hosts = tmp_path / ".nccl.conf", tmp_path / "etc.conf"
    users.write_bytes("# für alle\nNCCL_IB_DISABLE=1\n\nNCCL_SOCKET_IFNAME==eth1\n NCCL_NET=IB\n".encode("latin-1"))
    hosts.write_text("NCCL_SOCKET_IFNAME=eth0\nNCCL_DEBUG=WARN\n")
    monkeypatch.setattr(nccl, "_home", lambda: tmp_path)
    found = settings({"NCCL_IB_DISABLE": "0"}, hosts)
    assert found == {"NCCL_SOCKET_IFNAME": "=eth1", " NCCL_NET": "IB", "NCCL_DEBUG": "WARN"}
    assert gpu_host(variables={"NCCL_IB_DISABLE": "0"}, nccl_conf=found).settings == {"NCCL_IB_DISABLE": "0", **found}
    named = settings({"NCCL_CONF_FILE": str(hosts)}, tmp_path / "none")
    assert named == {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_DEBUG": "WARN"}
    monkeypatch.setattr(nccl, "_home", lambda: tmp_path / "none")
    assert settings({}, tmp_path / "none") == {}


def card(folder: Path, name: str, driver: str, layer: str, state: str, rate: str, gids: tuple[str, ...] = ()) -> None:
    """A card of one port in /sys/class/infiniband."""
    port = folder / name / "ports" / "1"
    (port / "gid_attrs" / "types").mkdir(parents=True)
    (folder / name / "device").mkdir()
    (folder / driver).mkdir(exist_ok=True)
    (folder / name / "device" / "driver").symlink_to(folder / driver)
    for file, text in {"link_layer": layer, "state": state, "rate": rate}.items():
        (port / file).write_text(f"{text}\n")
    for i, gid in enumerate(gids):
        (port / "gid_attrs" / "types" / str(i)).write_text(f"{gid}\n")


def test_the_ports_of_rdma_cards(tmp_path: Path) -> None:
    card(tmp_path, "mlx5_0", "mlx5_core", "InfiniBand", "4: ACTIVE", "400 Gb/sec (4X NDR)", ("IB/RoCE v1",))
    card(tmp_path, "mlx5_1", "mlx5_core", "InfiniBand", "1: DOWN", "10 Gb/sec (4X SDR)")
    card(tmp_path, "mlx5_2", "mlx5_core", "Ethernet", "4: ACTIVE", "200 Gb/sec (4X HDR)", ("IB/RoCE v1", "RoCE v2"))
    card(tmp_path, "rdmap1s0", "efa", "Unknown", "4: ACTIVE", "100 Gb/sec (4X EDR)")
    (tmp_path / "mlx5_0/ports/1/gid_attrs/types/1").mkdir()  # as one that is not in use, it cannot be read
    found = machine.ports(tmp_path)
    assert found == (
        Port("mlx5_0:1", "InfiniBand", True, 400.0, "mlx5_core"),
        Port("mlx5_1:1", "InfiniBand", False, 10.0, "mlx5_core"),
        Port("mlx5_2:1", "Ethernet", True, 200.0, "mlx5_core", True),
        Port("rdmap1s0:1", "Unknown", True, 100.0, "efa"),
    )
    host = gpu_host(ports=found)
    assert ([one.name for one in host.rdma], host.rdma_name, host.efa) == (
        ["mlx5_0:1", "mlx5_2:1"], "InfiniBand and RoCE", True,
    )  # fmt: skip
    assert machine.ports(tmp_path / "none") == ()
    assert not machine.verbs(tmp_path / "none")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/uverbs0").touch()
    assert machine.verbs(tmp_path / "dev")


GIB = 2**30


@pytest.mark.parametrize(
    ("groups", "folder", "files", "memory"),
    [
        ("0::/job_7/step_0\n", "", {}, (64, 60)),
        ("0::/job_7/step_0\n", "job_7", {"max": 8 * GIB, "current": 6 * GIB, "inactive_file": GIB}, (8, 3)),
        ("0::/\n", "", {"max": 8 * GIB, "current": 2 * GIB, "inactive_file": 0}, (8, 6)),
        ("0::/job_7\n", "job_7", {"max": "max", "current": 6 * GIB, "inactive_file": 0}, (64, 60)),
        (
            "9:cpu:/x\n4:memory:/slurm/job_7\n0::/\n", "memory/slurm/job_7",
            {"limit_in_bytes": 16 * GIB, "usage_in_bytes": 4 * GIB, "total_inactive_file": 2 * GIB}, (16, 14),
        ),
    ],
)  # fmt: skip
def test_memory_is_that_of_the_group_that_a_job_is_held_to(
    tmp_path: Path, groups: str, folder: str, files: dict[str, object], memory: tuple[float, float]
) -> None:
    host, own = tmp_path / "meminfo", tmp_path / "cgroup"
    host.write_text(f"MemTotal: {64 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {60 * 2**20} kB\n")
    own.write_text(groups)
    group = tmp_path / "root" / folder
    group.mkdir(parents=True)
    for name, value in files.items():
        file = "stat" if name.endswith("inactive_file") else name
        (group / f"memory.{file}").write_text(f"{name} {value}\n" if file == "stat" else f"{value}\n")
    assert machine.memory_gib(host, own, tmp_path / "root") == memory
