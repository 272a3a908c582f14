"""What is found on a host, and what NCCL finds there and says."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import yaml

from meshtrain.doctor import facts, nccl
from meshtrain.doctor.nccl import (
    library_cache,
    net_plugin,
    settings_of_files,
    slow_settings,
    transports,
)
from meshtrain.doctor.records import Host, Interface, Place, Port

LO, ETH0 = Interface("lo", ("127.0.0.1",)), Interface("eth0", ("10.0.0.1",))
OFI = "/opt/ofi/lib/libnccl-net.so"


def gpu_host(**values: object) -> Host:
    place = Place("torchrun's options", "c10d", "a", 1, "job", 2, 2)
    return replace(Host("a", place, 8, gpus_seen=8, interfaces=(LO, ETH0)), **values)  # type: ignore[arg-type]


def infiniband(**variables: str) -> Host:
    return gpu_host(ports=(Port("mlx5_0:1"),), variables=variables)


NCCL_LOG = """node1:7:9 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB eth0:10.0.0.1<0>
node1:7:9 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0> [1]eth1:fe80::1%eth1<0>
node1:7:9 [0] NCCL INFO Using network IB
node1:7:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
node1:7:9 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM
node1:7:9 [0] NCCL INFO Channel 00/0 : 7[7] -> 8[0] [send] via NET/IB/3/GDRDMA
node1:7:9 [0] NCCL INFO Channel 00/0 : 7[7] -> 8[0] [send] via NET/AWS Libfabric/0/GDRDMA comm 0x55 nRanks 16
node1:7:9 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via SHM/direct/direct
"""


def test_the_transport_is_what_nccl_says() -> None:
    assert transports(NCCL_LOG) == [
        "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]",
        "NET/Socket : Using [0]eth0 [1]eth1",
        "via NET/AWS Libfabric/GDRDMA",
        "via NET/IB/GDRDMA",
        "via P2P/CUMEM",
        "via SHM/direct/direct",
    ]
    assert transports("") == []


def test_what_makes_a_job_slower_is_named_with_its_value() -> None:
    usual = {
        "NCCL_P2P_LEVEL": "NVL",
        "NCCL_NET_GDR_LEVEL": "SYS",
        "NCCL_IB_DISABLE": "0",
        "NCCL_NET": "IB",
    }
    assert slow_settings(infiniband(**usual)) == []
    slow = {
        "NCCL_P2P_LEVEL": "LOC",
        "NCCL_NET_GDR_LEVEL": "LOC",
        "NCCL_IB_DISABLE": "1",
        "NCCL_NET": "Socket",
    }
    named = ["NCCL_P2P_LEVEL=LOC", "NCCL_IB_DISABLE=1", "NCCL_NET=Socket", "NCCL_NET_GDR_LEVEL=LOC"]
    assert list(map(str, slow_settings(infiniband(**slow)))) == named
    sockets = slow_settings(gpu_host(variables=slow))
    assert list(map(str, sockets)) == named[:1], "there is nothing else than sockets"
    by_plugin = slow_settings(gpu_host(net_plugin=OFI, nccl_conf=slow))
    assert list(map(str, by_plugin)) == [named[0], *named[2:]]
    assert {setting.of_file for setting in by_plugin} == {True}
    assert slow_settings(replace(infiniband(**slow), gpus_seen=0)) == [], (
        "gloo does not look at them"
    )


# What is found on a host --------------------------------------------------------------------------


def test_the_plugin_of_a_network(tmp_path: Path) -> None:
    mine, whole = tmp_path / "libnccl-net-mine.so", tmp_path / "odd [1]/x.so"
    whole.parent.mkdir()
    mine.touch()
    whole.touch()
    cached = {
        "libnccl-net.so": "/lib/libnccl-net.so",
        "libnccl-net-ofi.so": "/lib/libnccl-net-ofi.so",
    }
    path = {"LD_LIBRARY_PATH": f":/:/**:{whole.parent}:{tmp_path}"}
    assert net_plugin({}, {}) == ""
    assert net_plugin({}, cached) == "/lib/libnccl-net.so"
    for asked in ("none", "NONE", "gone", "/gone/x.so"):
        assert net_plugin(path | {"NCCL_NET_PLUGIN": asked}, cached) == "", asked
    for asked in ("mine", "libnccl-net-mine.so", "gone,mine"):
        assert net_plugin(path | {"NCCL_NET_PLUGIN": asked}, cached) == str(mine), asked
    for asked in (str(whole), "x.so"):
        assert net_plugin(path | {"NCCL_NET_PLUGIN": asked}, cached) == str(whole), asked
    assert net_plugin(path | {"NCCL_NET_PLUGIN": "ofi"}, cached) == "/lib/libnccl-net-ofi.so"
    assert library_cache()["libc.so.6"].startswith("/"), "what the loader knows"


def test_nccl_reads_files_of_settings_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    users, hosts = tmp_path / ".nccl.conf", tmp_path / "etc.conf"
    users.write_bytes(
        "# für alle\nNCCL_IB_DISABLE=1\n\nNCCL_SOCKET_IFNAME==eth1\n NCCL_NET=IB\n".encode(
            "latin-1"
        )
    )
    hosts.write_text("NCCL_SOCKET_IFNAME=eth0\nNCCL_DEBUG=WARN\n")
    monkeypatch.setattr(nccl, "_home", lambda: tmp_path)
    found = settings_of_files({"NCCL_IB_DISABLE": "0"}, hosts)
    assert found == {"NCCL_SOCKET_IFNAME": "=eth1", " NCCL_NET": "IB", "NCCL_DEBUG": "WARN"}
    assert gpu_host(variables={"NCCL_IB_DISABLE": "0"}, nccl_conf=found).settings == {
        "NCCL_IB_DISABLE": "0",
        **found,
    }
    named = settings_of_files({"NCCL_CONF_FILE": str(hosts)}, tmp_path / "none")
    assert named == {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_DEBUG": "WARN"}
    monkeypatch.setattr(nccl, "_home", lambda: tmp_path / "none")
    assert settings_of_files({}, tmp_path / "none") == {}


def card(
    folder: Path,
    name: str,
    driver: str,
    layer: str,
    state: str,
    rate: str,
    gids: tuple[str, ...] = (),
) -> None:
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
    card(
        tmp_path,
        "mlx5_0",
        "mlx5_core",
        "InfiniBand",
        "4: ACTIVE",
        "400 Gb/sec (4X NDR)",
        ("IB/RoCE v1",),
    )
    card(tmp_path, "mlx5_1", "mlx5_core", "InfiniBand", "1: DOWN", "10 Gb/sec (4X SDR)")
    card(
        tmp_path,
        "mlx5_2",
        "mlx5_core",
        "Ethernet",
        "4: ACTIVE",
        "200 Gb/sec (4X HDR)",
        ("IB/RoCE v1", "RoCE v2"),
    )
    card(tmp_path, "rdmap1s0", "efa", "Unknown", "4: ACTIVE", "100 Gb/sec (4X EDR)")
    (
        tmp_path / "mlx5_0/ports/1/gid_attrs/types/1"
    ).mkdir()  # as one that is not in use, it cannot be read
    found = facts.ports(tmp_path)
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
    assert facts.ports(tmp_path / "none") == ()
    assert not facts.verbs(tmp_path / "none")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/uverbs0").touch()
    assert facts.verbs(tmp_path / "dev")


MEMORY = yaml.safe_load(Path(__file__).with_name("memory_groups.yaml").read_text())


def test_memory_is_that_of_the_group_that_a_job_is_held_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = SimpleNamespace(total=64 * 2**30, available=60 * 2**30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: host)
    own = tmp_path / "cgroup"
    for name, row in MEMORY.items():
        own.write_text(row["groups"])
        root = tmp_path / name
        group = root / row.get("folder", "")
        group.mkdir(parents=True)
        for file, text in row.get("files", {}).items():
            (group / file).write_text(f"{text}\n")
        assert facts.memory_gib(own, root) == tuple(row["gib"]), name
