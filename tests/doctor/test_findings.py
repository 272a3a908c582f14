"""The doctor's judgement: from a healthy job, one thing is made wrong at a time, and just that is found."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshtrain.doctor import rules as rules_package
from meshtrain.doctor.findings import SENTENCES, status
from meshtrain.doctor.records import (
    ClusterFacts,
    Gpu,
    Host,
    Interface,
    JoinFailure,
    Link,
    PathFacts,
    PeerChecks,
    Place,
    Port,
    PortCheck,
    RecordError,
    Timing,
    Timings,
    UnknownPeer,
    from_json,
    to_json,
)
from meshtrain.doctor.report import block, digests, digests_text, findings_text, print_report, report_json
from meshtrain.doctor.rules import BLOCKING, blocking, judge

PLACE = Place("torchrun's options", "c10d", "node1", 29500, "job", 2, 2, processes="2")
GPU = Gpu(0, "H100", "GPU-1", 80.0, 0.0, "550.1")
READ = PathFacts("data.path", "/data/corpus", False, "/data/corpus", "", 1000, "abc", 500.0, "", "nfs4")


def host(i: int) -> Host:
    address = f"10.0.0.{i}"
    return Host(
        host=f"node{i}",
        place=PLACE,
        processes=2,
        ranks=(2 * i - 2, 2 * i - 1),
        resolves={"node1": ("10.0.0.1",), f"node{i}": (address,)},
        interfaces=(
            Interface("lo", ("127.0.0.1",)),
            Interface("eth0", (address,)),
            Interface("eth1", (f"10.1.0.{i}",)),
        ),
        route=address,
        variables={"OMP_NUM_THREADS": "1"},
        versions={"torch": "2.13", "numpy": "2.1", "kernel": "6.1"},
        code={"meshtrain/train.py": "a1", "meshtrain/trainer.py": "b2"},
        config=("train:", "  steps: 3"),
        layout={"dp_shard": 2, "tp": 2},
        folder="/home/me",
        paths=(READ, PathFacts("train.output", "/out", True, "/out", "", None, "", None, f"t{i}", "nfs4", 500.0)),
        cores=8,
        memory_gib=64.0,
        memory_free_gib=60.0,
        shared_memory_gib=32.0,
        machine=f"boot{i}",
        port=40000 + i,
    )


def visit(i: int) -> PeerChecks:
    """What node i (from 0) finds when it looks at the others."""
    other = 1 - i
    address = f"10.0.0.{other + 1}"
    return PeerChecks(
        (PortCheck(i, other, address, 40001 + other, "open"),), {f"node{other + 1}": (address,)}, (f"t{other + 1}",)
    )


ROW = Timing("tp", "all-reduce", 2, False, 1e-4, 2**20, 1e-2, 1.1, 1e8)
TIMINGS = Timings("gloo", (ROW,), (Link(0, 2, 1e9),), {str(rank): 1e-3 for rank in range(4)}, {})
HEALTHY = ClusterFacts(
    (host(1), host(2)), None, (), 1.0, ((0.0, 0.0), (0.001, 0.001)), (visit(0), visit(1)), timings=TIMINGS
)

Change = Callable[[ClusterFacts], ClusterFacts]


def change(node: int, **values: Any) -> Change:
    """One host is different."""

    def changed(seen: ClusterFacts) -> ClusterFacts:
        hosts = list(seen.hosts)
        hosts[node] = replace(hosts[node], **values)
        return replace(seen, hosts=tuple(hosts))

    return changed


def everywhere(**values: Any) -> Change:
    return lambda seen: change(1, **values)(change(0, **values)(seen))


def place(node: int, **values: Any) -> Change:
    return lambda seen: change(node, place=replace(seen.hosts[node].place, **values))(seen)


def both_places(**values: Any) -> Change:
    return lambda seen: place(1, **values)(place(0, **values)(seen))


def after(*changes: Change) -> Change:
    def changed(seen: ClusterFacts) -> ClusterFacts:
        for one in changes:
            seen = one(seen)
        return seen

    return changed


def found_by(node: int, **values: Any) -> Change:
    """One host found something else when it looked at the other."""

    def changed(seen: ClusterFacts) -> ClusterFacts:
        visits = list(seen.visits)
        old = visits[node]
        assert old is not None
        visits[node] = replace(old, **values)
        return replace(seen, visits=tuple(visits))

    return changed


def whole(**values: Any) -> Change:
    return lambda seen: replace(seen, **values)


def failed(how: str, **values: Any) -> Change:
    """Node 2 did not get to node 1."""
    attempt = replace(JoinFailure(how, addresses=("10.0.0.1",), seconds=30.0), **values)
    return lambda seen: ClusterFacts((replace(seen.hosts[1], ranks=(), route="", port=0),), attempt)


def alone(**values: Any) -> Change:
    """Node 1 serves the endpoint and nobody came."""
    return lambda seen: after(place(0, **values))(
        ClusterFacts(seen.hosts[:1], waited=30.0, clocks=((0.0, 0.0),), visits=(PeerChecks(),))
    )


def path(node: int, key: str, **values: Any) -> Change:
    def changed(seen: ClusterFacts) -> ClusterFacts:
        paths = tuple(replace(one, **values) if one.key == key else one for one in seen.hosts[node].paths)
        return change(node, paths=paths)(seen)

    return changed


def timed(**values: Any) -> Change:
    return lambda seen: replace(seen, timings=replace(TIMINGS, **values))


def reach(node: int, how: str, *more: PortCheck) -> Change:
    other = 1 - node
    return found_by(node, reach=(PortCheck(node, other, f"10.0.0.{other + 1}", 40001 + other, how), *more))


GPUS = everywhere(gpus=(GPU, replace(GPU, index=1)), gpus_seen=2)
STATIC = after(both_places(backend="static"), place(0, node_rank=0), place(1, node_rank=1))
NAMES = {"10.1.0.1": ("10.1.0.1",), "node1": ("10.0.0.1",)}
SECONDARY = after(both_places(address="10.1.0.1"), change(0, resolves=NAMES))
ETH1 = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth1"}
NCCL_ETH1 = everywhere(variables={"NCCL_SOCKET_IFNAME": "eth1"})
STUCK = {"3": "not done with all-reduce over tp after 25 s"}
NO_GPUS = after(both_places(processes="gpu"), change(1, processes=0, ranks=()), everywhere(layout=None))
THREE = (Link(0, 2, 1e9), Link(0, 4, 1e7), Link(2, 4, 1.1e7))
IB = tuple(Port(f"mlx5_{i}:1", gbit=400.0, driver="mlx5_core") for i in range(8))
DOWN = tuple(replace(one, active=one.name != "mlx5_3:1") for one in IB)
SLOW = tuple(replace(one, gbit=100.0) for one in IB[:2]) + IB[2:]
SLOW_TOLD = "mlx5_0:1 has 100 instead of 400 Gb/s, mlx5_1:1 has 100 instead of 400 Gb/s"
ROCE = tuple(replace(one, layer="Ethernet", roce_v2=True) for one in IB)
EFA = tuple(Port(f"rdmap{i}s0:1", "Unknown", gbit=100.0, driver="efa") for i in range(8))
SHUT = PortCheck(0, 1, "10.1.0.2", 40002, "silent")

# id, what is wrong, and words that have to be in what is said (who, what, and the fix).
CASES: list[tuple[str, Change, tuple[str, ...]]] = [
    ("endpoint-unresolved", failed("unresolved", addresses=()), ("node1 does not resolve on node2",)),
    ("endpoint-refused", failed("refused"), ("nothing listens on its port 29500", "is_host=1")),
    ("endpoint-refused", after(STATIC, failed("refused")), ("--node-rank=0",)),
    ("serving-elsewhere", after(STATIC, place(1, node_rank=0), failed("refused")), ("node1:29500", "--node-rank=0")),
    ("not-serving", after(STATIC, failed("refused", addresses=("10.0.0.2",))), ("is the host", "--node-rank=1")),
    ("endpoint-port-dropped", failed("silent", alive=True), ("a firewall drops it", "port 29500 of node1")),
    ("endpoint-unreachable", failed("silent", alive=False), ("on any port", "ip route get 10.0.0.1")),
    ("endpoint-unreachable", failed("unreachable", detail="No route to host"), ("No route to host",)),
    ("endpoint-stranger", failed("stranger", detail="a web server"), ("no doctor but a web server",)),
    ("endpoint-stranger", failed("stranger"), ("says nothing",)),
    ("endpoint-taken", failed("taken", detail="process 7 (sshd)"), ("process 7 (sshd)", "another port on all nodes")),
    ("leader-left", failed("left", detail="it hung up"), ("then was gone: it hung up",)),
    ("endpoint-loopback", failed("refused", addresses=("127.0.1.1",)), ("resolves to a loopback address on node2",)),
    ("nodes-missing", alone(), ("1 of 2 nodes", "node1 (id job, 2 nodes, node1:29500)")),
    ("nodes-missing", after(STATIC, alone()), ("node ranks that did not come: 1",)),
    ("nodes-missing", alone(launcher="srun", expected=("n1", "n2"), node_rank=0, ranks=(0,)), ("missing: n2",)),
    ("nodes-missing", both_places(most=3), ("2 of 2:3 nodes",)),
    ("id-differs", place(1, id="other"), ("job on node1; other on node2", "--rdzv-id")),
    ("served-twice", place(1, serves=True), ("node2 was told to serve the endpoint node1:29500 itself", "as node1")),
    ("nodes-differ", place(1, fewest=3, most=3), ("2 on node1; 3 on node2", "--nnodes")),
    ("backend-differs", place(1, backend="static", node_rank=1), ("static on node2",)),
    ("endpoint-differs", place(1, address="10.0.0.1"), ("10.0.0.1:29500 on node2",)),
    ("node-rank-twice", after(STATIC, place(1, node_rank=0)), ("was given to node1, node2", "1 is not taken")),
    ("stranger-at-endpoint", whole(strangers=(UnknownPeer("10.0.0.9", "somebody"),)), ("10.0.0.9 came somebody",)),
    ("serving-unrecognised", SECONDARY, ("is_host=1", "10.1.0.1 is an address of node1")),
    ("node-fell-silent", whole(silent=("node2",)), ("node2 came to the endpoint and then",)),
    ("too-few-gpus", after(GPUS, change(1, gpus_seen=1)), ("2 processes and finds 1 GPUs", "--nproc-per-node=1")),
    ("no-processes", NO_GPUS, ("0 processes on node2",)),
    ("gpus-not-used", everywhere(gpus=(GPU,)), ("has 1 GPUs and torch 2.13 finds none",)),
    ("gpus-missing", after(GPUS, change(1, gpus=(), gpus_seen=0)), ("node2 has none",)),
    ("gpu-in-use", after(GPUS, change(1, gpus=(replace(GPU, used_gib=20.0),))), ("20.0 GiB",)),
    ("gpu-throttled", after(GPUS, change(0, gpus=(replace(GPU, throttled="heat (hardware)"),))), ("GPU 0 of node1",)),
    ("layout-does-not-fit", everywhere(layout={"dp_shard": 3}), ("needs 3 processes and there are 4",)),
    ("layout-crosses-hosts", everywhere(layout={"tp": 4}), ("tp crosses hosts",)),
    ("config-wrong", change(1, config_error="my.yaml:3: no such key", config=(), layout=None), ("my.yaml:3", "node2")),
    ("config-differs", change(1, config=("train:", "  steps: 4")), ("- steps: 3; + steps: 4", "node2")),
    ("code-differs", change(1, code={"meshtrain/train.py": "a2"}), ("meshtrain/train.py, meshtrain/trainer.py",)),
    ("torch-differs", change(1, versions={"torch": "2.11", "numpy": "2.1", "kernel": "6.1"}), ("2.11 on",)),
    ("numpy-differs", change(1, versions={"torch": "2.13", "kernel": "6.1"}), ("(none) on node2",)),
    ("kernel-differs", change(1, versions={"torch": "2.13", "numpy": "2.1", "kernel": "5.4"}), ("5.4 on node2",)),
    ("environment-differs", change(1, variables={"OMP_NUM_THREADS": "4"}), ("OMP_NUM_THREADS", "4 on node2")),
    ("slow-switch", after(GPUS, everywhere(variables={"NCCL_P2P_DISABLE": "1"})), ("unset NCCL_P2P_DISABLE",)),
    ("slow-switch", after(GPUS, change(1, nccl_conf={"NCCL_P2P_LEVEL": "LOC"})), ("on node2", "/etc/nccl.conf")),
    ("clock-differs", whole(clocks=((0.0, 0.0), (-120.0, 0.1))), ("node2 is 120.0 s behind that of node1",)),
    ("little-memory", change(1, memory_free_gib=2.0), ("node2 has 2.0 of 64 GiB",)),
    ("little-shared-memory", after(GPUS, everywhere(shared_memory_gib=0.0625)), ("64 MiB", "--shm-size")),
    ("locked-memory-limited", everywhere(ports=IB, locked_memory_kib=64), ("64 KiB",)),
    ("few-descriptors", change(0, open_files=(512, 515)), ("node1", "may open 515 files", "4 ranks needs 516")),
    ("few-descriptors", change(0, open_files=(512, 4096)), ("node1", "may open 512 files", "ulimit -n 516")),
    ("host-busy", change(1, load=40.0), ("node2", "a load of 40.0 on 8 cores")),
    ("little-disk", path(1, "train.output", free_gib=5.0), ("train.output on node2 has 5.0 GiB",)),
    ("path-missing", path(1, "data.path", problem="is not there", seen="/"), ("is not there", "all right on node1")),
    ("path-not-writable", path(1, "train.output", problem="read-only file system", token=""), ("read-only", "node2")),
    ("data-differs", path(1, "data.path", digest="xyz"), ("digest abc on node1", "digest xyz on node2")),
    ("folder-not-shared", after(found_by(0, tokens=()), found_by(1, tokens=())), ("train.output (/out)", "nfs4")),
    ("slow-read", path(1, "data.path", mib_per_s=10.0), ("10 MiB/s on node2",)),
    ("slow-read", path(1, "train.output", mib_per_s=10.0), ("train.output is read with 10 MiB/s on node2",)),
    ("name-is-loopback", change(1, resolves={"node2": ("127.0.1.1",)}), ("127.0.1.1", "GLOO_SOCKET_IFNAME=eth0")),
    ("name-unresolved", change(1, resolves={"node2": ()}), ("`10.0.0.2 node2`",)),
    ("name-of-other-wrong", found_by(1, names={"node1": ()}), ("node2 cannot resolve the name node1",)),
    ("name-of-other-wrong", found_by(1, names={"node1": ("127.0.1.1",)}), ("which is node2 itself",)),
    ("name-of-other-wrong", found_by(1, names={"node1": ("10.9.9.9",)}), ("which is no address of node1",)),
    ("same-name", change(1, host="node1", resolves={"node1": ("10.0.0.2",)}), ("all call themselves node1",)),
    ("slow-look-up", change(1, slow_names=("node1",)), ("node2 takes seconds to resolve node1",)),
    ("interface-missing", everywhere(variables={"GLOO_SOCKET_IFNAME": "ib0"}), ("ib0 fits no interface",)),
    ("interface-wrong", change(1, variables=ETH1), ("eth1 (10.1.0.2)", "=eth0 on node2")),
    ("interface-wrong", after(GPUS, NCCL_ETH1, reach(0, "open", SHUT)), ("10.1.0.2 gets no answer",)),
    ("ports-closed", after(reach(0, "silent"), reach(1, "silent")), ("node1 to node2, node2 to node1",)),
    ("ports-closed", reach(0, "refused"), ("is refused: node1 to node2",)),
    ("address-of-another", reach(0, "another: \"x\""), ("reaches another host at 10.0.0.2",)),
    ("infiniband-differs", change(0, ports=IB), ("node2 has no active InfiniBand",)),
    ("infiniband-differs", after(everywhere(ports=IB), change(0, ports=DOWN)), ("node1 has less", "mlx5_3:1 is not")),
    ("infiniband-differs", after(everywhere(ports=IB), change(1, ports=SLOW)), (SLOW_TOLD, "node2 has less")),
    ("roce-gid-missing", everywhere(ports=(replace(ROCE[0], roce_v2=False),)), ("mlx5_0:1 of node1", "show_gids")),
    ("rdma-not-given", everywhere(ports=IB, verbs=False), ("/dev/infiniband", "node1, node2")),
    ("no-gpudirect", after(GPUS, everywhere(ports=IB), timed(transport=("via NET/IB",))), ("nvidia_peermem",)),
    ("plugin-missing", after(GPUS, everywhere(nccl_conf={"NCCL_NET": "AWS Libfabric"})), ("NCCL would end",)),
    ("plugin-missing", after(GPUS, everywhere(ports=EFA)), ("aws-ofi-nccl", "node1 has cards of EFA")),
    ("plugin-missing", after(GPUS, everywhere(nccl_conf={"NCCL_NET_PLUGIN": "ofi"})), ("ofi, which is not found",)),
    ("not-timed", timed(skipped="the job has one process"), ("the job has one process",)),
    ("no-time-left", timed(left_out=("all-gather over tp",)), ("no time for all-gather over tp",)),
    ("collective-failed", timed(stuck=STUCK), ("ranks 3 on node2", "all-reduce over tp")),
    ("slow-link", timed(links=(Link(0, 2, 1e9), Link(1, 3, 1e7), Link(0, 3, 1e9))), ("10.0 MB/s", "1.00 GB/s")),
    ("slow-rank", timed(compute={"0": 1e-3, "1": 1e-3, "2": 1e-3, "3": 9e-3}), ("rank 3 on node2 takes 9.0 times",)),
    ("unsteady", timed(timings=(replace(ROW, spread=9.0),)), ("9.0 times as long",)),
]  # fmt: skip


def ports(*rates: float, first: int = 0, down: tuple[int, ...] = ()) -> tuple[Port, ...]:
    """Cards of these rates in Gb/s, numbered from `first`."""
    return tuple(Port(f"mlx5_{first + i}:1", gbit=rate, active=i not in down) for i, rate in enumerate(rates))


@pytest.mark.parametrize(
    ("each", "short"),
    [
        ((ports(400, 400), ports(400, 400, first=2)), {}),  # other names
        ((ports(400, 400, 100), ports(400, 400)), {}),  # one more, for storage
        ((ports(100, 400, 400), ports(400, 400)), {}),
        ((ports(400, 400, 10, down=(2,)), ports(400, 400, 10, down=(2,))), {}),  # a spare one on every host
        ((ports(400, 400), ports(400, 400, down=(1,))), {"node2": ["mlx5_1:1 is not active"]}),
        ((ports(400, 200), ports(400, 400)), {"node1": ["mlx5_1:1 has 200 instead of 400 Gb/s"]}),
    ],
)
def test_ports_are_compared_by_name_only_where_a_host_has_less(
    each: tuple[tuple[Port, ...], ...], short: dict[str, list[str]]
) -> None:
    seen = after(*(change(i, ports=found) for i, found in enumerate(each)))(HEALTHY)
    found = [one for one in judge(seen) if one.id == "infiniband-differs"]
    assert {node for one in found for node in one.where} == set(short), findings_text(found)
    for one in found:
        assert all(words in one.what for words in short[one.where[0]])


def test_nothing_is_found_in_a_healthy_job() -> None:
    found = judge(HEALTHY)
    assert [one.id for one in found] == ["transport"], findings_text(found)
    assert found[0].what == "gloo over TCP on eth0"
    assert status(found) == 0
    assert findings_text(found).endswith("all is well")


IPOIB = after(*(
    change(i, interfaces=(
        Interface("lo", ("127.0.0.1",)),
        Interface("eno1", (f"10.0.0.{i + 1}",)),
        *(Interface(f"ib{n}", (f"10.{n + 1}.0.{i + 1}",)) for n in range(8)),
    ))
    for i in range(2)
))  # fmt: skip


def tried(how: str) -> Change:
    """Each host has tried the other's addresses, and reaches those of InfiniBand like this."""
    return after(
        *(
            reach(i, "open", *(PortCheck(i, 1 - i, f"10.{n + 1}.0.{2 - i}", 40002 - i, how) for n in range(8)))
            for i in range(2)
        )
    )


@pytest.mark.parametrize(
    ("different", "way"),
    [
        (
            after(IPOIB, tried("open"), everywhere(ports=IB)),
            "there is: InfiniBand",
        ),
        (everywhere(ports=ROCE), "there is: RoCE"),
        (
            everywhere(ports=EFA, net_plugin="/opt/libnccl-net.so"),
            "there is: the plugin /opt/libnccl-net.so",
        ),
        (everywhere(), "there is: TCP sockets on eth0"),
    ],
    ids=["InfiniBand", "RoCE", "EFA", "Ethernet"],
)
def test_a_healthy_cluster_has_no_findings(different: Change, way: str) -> None:
    """As its hosts are when nothing is set: of several interfaces NCCL takes InfiniBand's for its sockets."""
    wide = everywhere(open_files=(1024, 1048576), locked_memory_kib=None)
    found = judge(after(GPUS, wide, different)(HEALTHY))
    assert {one.id for one in found} == {"transport"}, findings_text(found)
    assert any(way in one.what for one in found)


def test_an_interface_that_the_others_do_not_reach_is_wrong() -> None:
    there = after(GPUS, IPOIB, everywhere(ports=IB))
    shut = [one for one in judge(after(there, tried("silent"))(HEALTHY)) if one.id != "transport"]
    assert [(one.severity, one.id) for one in shut] == [("error", "interface-wrong")] * 2
    assert "takes ib0 (10.1.0.2) of node2" in shut[1].what
    assert "10.1.0.2 gets no answer from the other hosts" in shut[1].what
    unknown = [one for one in judge(there(HEALTHY)) if one.id != "transport"]
    assert [(one.severity, one.id) for one in unknown] == [("warning", "interface-wrong")] * 2


@pytest.mark.parametrize(("id_", "wrong", "words"), CASES, ids=[f"{i}-{case[0]}" for i, case in enumerate(CASES)])
def test_what_is_wrong_is_found_and_nothing_else(id_: str, wrong: Change, words: tuple[str, ...]) -> None:
    found = [one for one in judge(wrong(HEALTHY)) if one.id != "transport"]
    assert {one.id for one in found} == {id_}, findings_text(found)
    said = "\n".join(map(block, found))
    for word in words:
        assert word in said, said
    assert all(one.fix for one in found if one.severity != "note")
    assert status(found) == int(found[0].severity == "error")


def ids_in_the_rules() -> set[str]:
    """The ids are the names in the table of sentences, up to the case."""
    return {key.partition("/")[0] for key in SENTENCES} - {"version-differs"}


def test_every_finding_has_a_case_and_every_sentence_a_rule() -> None:
    cases = {id_ for id_, _, _ in CASES}
    assert len(ids_in_the_rules()) > 40
    assert ids_in_the_rules() - cases == {"transport", "same-host"}
    assert cases >= BLOCKING
    rules = "".join(room.read_text() for room in Path(rules_package.__file__).parent.glob("*.py"))
    unused = {key for key in SENTENCES if f'"{key}"' not in rules and f'"{key.partition("/")[0]}/{{' not in rules}
    assert {id_ for id_ in unused if not id_.startswith("endpoint-")} == set()


def test_every_finding_is_in_the_table_of_the_docs() -> None:
    document = (Path(__file__).parents[2] / "docs" / "multi-node.md").read_text()
    document = document.partition("\n## Troubleshooting\n")[2].partition("\n## ")[0]
    table = set(re.findall(r"`([a-z]+(?:-[a-z]+)+|transport|unsteady)`", document))
    explained_by_themselves = {
        "config-wrong",
        "not-timed",
        "same-host",
        "leader-left",
        "node-fell-silent",
    }
    every = ids_in_the_rules() | {id_ for id_, _, _ in CASES if not id_.endswith(("numpy-differs", "kernel-differs"))}
    assert every - table == explained_by_themselves
    assert table - every == {"nvidia-smi"}, "the docs name what no rule says"


def test_agents_of_one_host_are_no_two_hosts() -> None:
    twin = replace(host(1), ranks=(2, 3))
    seen = replace(HEALTHY, hosts=(host(1), twin), visits=(PeerChecks(), PeerChecks()), timings=None)
    found = {one.id: one for one in judge(seen)}
    assert set(found) == {"same-host", "transport"}
    assert found["same-host"].where == ("node1 (node 0)", "node1 (node 1)")


def test_who_was_told_to_serve_an_endpoint_that_is_another_host() -> None:
    def of(address: str) -> dict[str, str]:
        seen = change(0, resolves={"node1": (address,)})(alone(serves=True)(HEALTHY))
        return {one.id: one.what for one in judge(seen) if one.id != "transport"}

    assert set(of("10.0.0.1")) == {"nodes-missing"}
    assert set(of("10.0.0.9")) == {"nodes-missing", "serving-elsewhere"}
    assert "node1 is 10.0.0.9. The others go there" in of("10.0.0.9")["serving-elsewhere"]


def test_the_slow_host_is_named_where_all_its_links_are_slow() -> None:
    third = replace(host(3), ranks=(4, 5))
    seen = replace(HEALTHY, hosts=(*HEALTHY.hosts, third), timings=replace(TIMINGS, links=THREE))
    (slow,) = [one for one in judge(seen) if one.id == "slow-link"]
    assert slow.where == ("node3",)
    assert "every slow link is one of node3's" in slow.what


def test_a_node_too_few_of_an_elastic_job_is_a_warning() -> None:
    elastic = both_places(most=3)(HEALTHY)
    assert [one.severity for one in judge(elastic) if one.id == "nodes-missing"] == ["warning"]
    assert [one.severity for one in judge(alone()(HEALTHY)) if one.id == "nodes-missing"] == ["error"]


def test_a_loopback_name_is_an_error_only_where_gloo_goes_by_it() -> None:
    loopback = change(1, resolves={"node2": ("127.0.1.1",)})
    chosen = everywhere(variables={"GLOO_SOCKET_IFNAME": "eth0"})
    for more, severity in ((whole(), "error"), (chosen, "warning"), (GPUS, "warning")):
        found = judge(after(loopback, more)(HEALTHY))
        assert [one.severity for one in found if one.id == "name-is-loopback"] == [severity]


def test_of_three_hosts_the_one_with_a_disk_of_its_own_is_named() -> None:
    third = replace(host(3), ranks=(4, 5))
    seen = replace(HEALTHY, hosts=(*HEALTHY.hosts, third), visits=(visit(0), visit(1), PeerChecks()))
    assert [one.where for one in judge(seen) if one.id == "folder-not-shared"] == [("node3",)]


def test_only_what_hinders_the_ranks_hinders_timing_them() -> None:
    assert blocking(judge(HEALTHY)) == []
    assert blocking(judge(path(1, "data.path", problem="is not there")(HEALTHY))) == []
    assert [one.id for one in blocking(judge(reach(0, "silent")(HEALTHY)))] == ["ports-closed"]


def test_a_record_survives_the_journey_and_a_forged_one_does_not() -> None:
    assert from_json(ClusterFacts, json.loads(json.dumps(to_json(HEALTHY)))) == HEALTHY
    for name, value in (("processes", "2"), ("processes", True), ("ranks", [None]), ("variables", []), ("place", 1)):
        with pytest.raises(RecordError, match=f"Host.{name}"):
            from_json(Host, to_json(host(1)) | {name: value})
    with pytest.raises(RecordError, match="extra"):
        from_json(Host, to_json(host(1)) | {"extra": 1})


def test_a_text_from_elsewhere_cannot_steer_the_terminal() -> None:
    odd = change(1, versions={"torch": "\x1b[2J", "numpy": "2.1", "kernel": "6.1"})(HEALTHY)
    (found,) = [one for one in judge(odd) if one.id == "torch-differs"]
    assert "\x1b" not in block(found)


def test_json_holds_what_was_found_and_from_what() -> None:
    report = json.loads(json.dumps(report_json(HEALTHY, judge(HEALTHY))))
    assert report["status"] == 0
    assert report["findings"][0]["id"] == "transport"
    assert report["seen"]["hosts"][1]["host"] == "node2"


def test_digests_tell_which_hosts_are_alike() -> None:
    alike = digests(HEALTHY)
    assert {kind: list(found.values()) for kind, found in alike.items()} == {
        kind: [["node1", "node2"]] for kind in ("code", "versions", "config", "environment")
    }
    changed = change(1, code={"meshtrain/train.py": "a1", "meshtrain/trainer.py": "c3"})(HEALTHY)
    other = digests(changed)
    assert sorted(other["code"].values()) == [["node1"], ["node2"]]
    assert other["config"] == alike["config"]
    assert re.search(r"digests: code \w{8}/\w{8}, versions \w{8}, ", digests_text(changed))


def test_a_table_in_80_columns_cuts_no_word(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshtrain.doctor.report.WIDTH", 80)
    print_report(HEALTHY, [], as_json=False)
    table = capsys.readouterr().out.partition("digests:")[0]
    assert "…" not in table
    assert {"processes", "GPUs", "clock", "disk"} <= set(table.split())
    assert max(map(len, table.splitlines())) <= 80
