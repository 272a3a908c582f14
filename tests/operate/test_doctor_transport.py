"""By what data goes from GPU to GPU, for hosts that are made up, and what NCCL finds on a host."""

from dataclasses import replace
from pathlib import Path

import pytest

from meshtrain.operate.doctor.nccl import gpudirect, net_plugin, settings
from meshtrain.operate.doctor.record import Host, Interface, Place
from meshtrain.operate.doctor.transport import slow_switches, transport

LO, ETH0 = Interface("lo", ("127.0.0.1/8",)), Interface("eth0", ("10.0.0.1/24",))
PCIE = "inside of a host: PCIe from GPU to GPU where the machine allows it (NCCL_P2P_LEVEL says how far apart), or "
SHARED, SOCKETS = PCIE + "shared memory", "between hosts: TCP sockets on eth0"
DIRECT = "between hosts: InfiniBand with GPUDirect by DMA-BUF, as far apart as NCCL_NET_GDR_LEVEL allows"


def gpu_host(**values: object) -> Host:
    place = Place("torchrun's options", "c10d", "a", 1, "job", 2, 2)
    return replace(Host("a", place, 8, gpus_seen=8, interfaces=(LO, ETH0)), **values)  # type: ignore[arg-type]


def infiniband(direct: str = "", plugin: str = "", **variables: str) -> Host:
    return gpu_host(infiniband=("mlx5_0:1",), gpudirect=direct, net_plugin=plugin, variables=variables)


@pytest.mark.parametrize(
    ("host", "inside", "between"),
    [
        (gpu_host(), SHARED, SOCKETS),
        (
            gpu_host(links=("NV12 0-1",)),
            "inside of a host: NVLink (NCCL_P2P_DISABLE, NCCL_P2P_LEVEL switch it off)",
            SOCKETS,
        ),
        (
            gpu_host(links=("NV1 0-1",), variables={"NCCL_P2P_DISABLE": "1"}),
            "inside of a host: shared memory, because of NCCL_P2P_DISABLE=1",
            SOCKETS,
        ),
        (
            gpu_host(links=("NV1 0-1",), variables={"NCCL_P2P_LEVEL": "loc"}),
            "inside of a host: shared memory, because of NCCL_P2P_LEVEL=loc",
            SOCKETS,
        ),
        (
            gpu_host(variables={"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}),
            "inside of a host: sockets, because of NCCL_P2P_DISABLE=1 and NCCL_SHM_DISABLE=1",
            SOCKETS,
        ),
        (
            gpu_host(variables={"NCCL_P2P_LEVEL": "PIX", "NCCL_SHM_DISABLE": "1"}),
            PCIE + "sockets, because of NCCL_SHM_DISABLE=1",
            SOCKETS,
        ),
        (infiniband("DMA-BUF"), SHARED, DIRECT),
        (infiniband("DMA-BUF", NCCL_NET_GDR_LEVEL="PHB", NCCL_NET="IB"), SHARED, DIRECT),
        (infiniband(), SHARED, "between hosts: InfiniBand without GPUDirect"),
        (
            infiniband("DMA-BUF", NCCL_NET_GDR_LEVEL="LOC"),
            SHARED,
            "between hosts: InfiniBand without GPUDirect, because of NCCL_NET_GDR_LEVEL=LOC",
        ),
        (infiniband("DMA-BUF", NCCL_IB_DISABLE="1"), SHARED, SOCKETS + ", because of NCCL_IB_DISABLE=1"),
        (infiniband("DMA-BUF", NCCL_NET="Socket"), SHARED, SOCKETS + ", because of NCCL_NET=Socket"),
        (infiniband("DMA-BUF", "libnccl-net.so", NCCL_NET="Socket"), SHARED, SOCKETS + ", because of NCCL_NET=Socket"),
        (
            gpu_host(net_plugin="/opt/ofi/lib/libnccl-net.so"),
            SHARED,
            "between hosts: what the plugin /opt/ofi/lib/libnccl-net.so offers, if it loads (NCCL_NET_PLUGIN=none "
            "switches it off)",
        ),
    ],
)
def test_the_transport_that_nccl_takes(host: Host, inside: str, between: str) -> None:
    assert transport([host, host]) == [inside, between]
    assert transport([host]) == [inside]


def test_hosts_that_differ_in_transport() -> None:
    found = transport([infiniband(), gpu_host()])
    ways = "InfiniBand without GPUDirect or TCP sockets on eth0"
    assert found[1] == f"between hosts: {ways} (the hosts differ: NCCL takes what all have)"


def test_what_makes_a_job_slower_is_named_with_its_value() -> None:
    usual = {"NCCL_P2P_LEVEL": "NVL", "NCCL_NET_GDR_LEVEL": "SYS", "NCCL_IB_DISABLE": "0", "NCCL_NET": "IB"}
    assert slow_switches(usual) == {}
    slow = {"NCCL_P2P_LEVEL": "LOC", "NCCL_NET_GDR_LEVEL": "0", "NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket"}
    assert list(slow_switches(slow)) == [
        *("NCCL_P2P_LEVEL=LOC", "NCCL_IB_DISABLE=1", "NCCL_NET=Socket", "NCCL_NET_GDR_LEVEL=0"),
    ]


# What is found on a host --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("modules", "kernel", "driver", "variables", "found"),
    [
        ("nvidia_peermem 16384 0 - Live\n", "5.4.0-150", "NVIDIA UNIX x86_64 Kernel Module", {}, "nvidia_peermem"),
        ("nv_peer_mem 16384 0 - Live\n", "4.18.0", "", {}, "nvidia_peermem"),
        ("nvidia 1 0\n", "5.15.0-91-generic", "NVIDIA UNIX Open Kernel Module for x86_64  570.1", {}, "DMA-BUF"),
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
    ofi, other = tmp_path / "x86_64-linux-gnu", tmp_path / "other"
    for folder, name in ((ofi, "libnccl-net.so"), (other, "libnccl-net-mine.so")):
        folder.mkdir()
        (folder / name).touch()
    usual = (f"{tmp_path}/*-linux-gnu",)
    path = {"LD_LIBRARY_PATH": f":/nowhere:{other}"}
    assert net_plugin({}, ()) == ""
    assert net_plugin({}, usual) == str(ofi / "libnccl-net.so")
    assert net_plugin({"NCCL_NET_PLUGIN": "none"}, usual) == ""
    assert net_plugin({"NCCL_NET_PLUGIN": "mine"} | path, usual) == str(other / "libnccl-net-mine.so")
    assert net_plugin({"NCCL_NET_PLUGIN": "libnccl-net-mine.so"} | path, usual) == str(other / "libnccl-net-mine.so")
    whole = str(other / "libnccl-net-mine.so")
    assert net_plugin({"NCCL_NET_PLUGIN": whole}, usual) == whole
    assert net_plugin({"NCCL_NET_PLUGIN": "gone"} | path, usual) == "gone", "it is asked for, and does not load"


def test_nccl_reads_files_of_settings_too(tmp_path: Path) -> None:
    users, hosts = tmp_path / ".nccl.conf", tmp_path / "etc.conf"
    users.write_text("# mine\nNCCL_IB_DISABLE=1\n\nNCCL_SOCKET_IFNAME==eth1\n")
    hosts.write_text("NCCL_SOCKET_IFNAME=eth0\nNCCL_DEBUG=WARN\n")
    variables = {"HOME": str(tmp_path), "NCCL_IB_DISABLE": "0"}
    found = settings(variables, hosts)
    assert found == {**variables, "NCCL_SOCKET_IFNAME": "=eth1", "NCCL_DEBUG": "WARN"}
    named = settings({"NCCL_CONF_FILE": str(hosts), "HOME": str(tmp_path)}, tmp_path / "none")
    assert (named["NCCL_SOCKET_IFNAME"], "NCCL_IB_DISABLE" in named) == ("eth0", False)
    assert settings({}, tmp_path / "none") == {}
