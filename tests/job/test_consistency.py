"""Ranks that are not alike are told apart before anything is built: key by key, with ranks and
hosts."""

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml

from meshtrain.config import Config
from meshtrain.data import Document, write
from meshtrain.errors import AgreedError
from meshtrain.job import consistency
from meshtrain.job.consistency import (
    NOT_SET,
    Fingerprint,
    describe_ranks,
    differences,
    require_equal,
    run_fingerprints,
)
from meshtrain.job.environment import Environment
from meshtrain.job.process import Job
from tests.launching import ROOT, forked
from tests.parity.experiments import QUICKSTART, SMALL

HOSTS = ["a", "a", "b", "b", "c"]


# In words -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([4], "rank 4 (host c)"),
        ([0, 1], "ranks 0-1 (host a)"),
        ([4, 0, 1, 2], "ranks 0-2, 4 (hosts a, b, c)"),
        (range(5, 4096), "ranks 5-4095 (hosts h0, h1, h2, h3 and 508 more)"),
        (range(5, 4096, 2), "ranks 5, 7, 9, 11 and 2042 more (hosts h0, h1, h2, h3 and 508 more)"),
    ],
)
def test_ranks_and_hosts(ranks: Sequence[int], text: str) -> None:
    hosts = HOSTS if max(ranks) < 5 else [f"h{rank // 8}" for rank in range(4096)]
    assert describe_ranks(ranks, hosts) == text


def test_long_lists_and_values_are_cut() -> None:
    values = [{str(key): f"{rank}{'x' * 500}" for key in range(50)} for rank in range(2)]
    lines = differences(values, [[0], [1], [2, 3], [4]], HOSTS)
    assert len(lines) == consistency.MOST_LINES + 2
    assert lines[-2:] == ["and 38 more", "and ranks 2-4 (hosts b, c) differ from all of these"]
    assert max(map(len, lines)) < 300


# Through the store --------------------------------------------------------------------------------


def together(topics: Sequence[Sequence[Fingerprint]]) -> list[str]:
    """What each of several ranks, threads of this process, is told: the error, or nothing."""
    store = dist.HashStore()

    def rank(number: int) -> str:
        place = Environment("torchrun", number, len(topics), number, HOSTS[number], None)
        try:
            require_equal(Job(place, torch.device("cpu"), store), *topics[number])
        except AgreedError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(topics)) as pool:
        return list(pool.map(rank, range(len(topics))))


CONFIG = Fingerprint("the config", {"lr": "0.001", "seed": "0"}, "use the same file")
DATA = Fingerprint("the data", {"fingerprint": "abc"}, "use the same data")


def test_ranks_that_are_alike_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With one message of each: the order of what is compared does not count."""
    rounds = []
    begin = Job.round
    monkeypatch.setattr(Job, "round", lambda job: rounds.append(job.rank) or begin(job))
    reordered = replace(CONFIG, values=dict(reversed(CONFIG.values.items())))
    assert together([[CONFIG, DATA], [reordered, DATA], [CONFIG, DATA]]) == ["", "", ""]
    assert sorted(rounds) == [0, 1, 2]
    assert capsys.readouterr().out == ""


def test_all_ranks_are_told_the_same_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each topic with ranks of its own, also where rank 0 is the odd one, and where no two ranks
    have the same."""
    monkeypatch.setattr(consistency, "MOST_VALUES", 4)
    seeds = [replace(CONFIG, values={"seed": str(rank)}) for rank in range(5)]
    data = [
        replace(DATA, values={"fingerprint": value, "path": "same"})
        for value in ("abc", *4 * ["def"])
    ]
    data[4] = replace(DATA, values={**data[4].values, "more": "x"})
    assert together(list(zip(seeds, data, strict=True))) == 5 * [
        "the config is not the same on all ranks:\n"
        "  seed: 0 on rank 0 (host a), 1 on rank 1 (host a), 2 on rank 2 (host b), 3 on rank 3 "
        "(host b)\n"
        "  and rank 4 (host c) differ from all of these\n"
        "use the same file\n"
        "the data is not the same on all ranks:\n"
        "  fingerprint: abc on rank 0 (host a), def on ranks 1-4 (hosts a, b, c)\n"
        f"  more: {NOT_SET} on ranks 0-3 (hosts a, b), x on rank 4 (host c)\n"
        "use the same data"
    ]


def test_ranks_that_have_not_looked_are_left_out() -> None:
    unseen = replace(DATA, values=None)
    assert together([[DATA], [unseen], [DATA], [unseen]]) == 4 * [""]
    (message,) = set(
        together([[DATA], [unseen], [replace(DATA, values={"fingerprint": "def"})], [unseen]])
    )
    assert "  fingerprint: abc on rank 0 (host a), def on rank 2 (host b)\n" in message


# What is compared ---------------------------------------------------------------------------------


def topics_of(*overrides: str, variables: dict[str, str] | None = None) -> dict[str, Fingerprint]:
    config = Config.load(QUICKSTART, overrides)
    return {topic.name: topic for topic in run_fingerprints(config, variables or {})}


def test_every_value_of_a_config_is_compared_and_the_order_of_the_axes() -> None:
    own = ("optimizer.betas=[0.9, 0.99]", "train.time_limit=null")
    values = topics_of(*own, "layout={dp_replicate: 2, dp_shard: 3}")["the config"].values
    others = topics_of(*own, "layout={dp_shard: 3, dp_replicate: 2}")["the config"].values
    expected = {
        "layout": "{dp_replicate: 2, dp_shard: 3}",
        "optimizer.betas": "(0.9, 0.99)",
        "train.time_limit": "null",
        "model.num_hidden_layers": "4",
    }
    assert values == values | expected
    assert {key for key in values if values[key] != others[key]} == {"layout"}


def test_the_code_is_that_of_meshtrain_its_models_and_the_users_files(tmp_path: Path) -> None:
    plain = topics_of()["the code"].values
    assert {"meshtrain/trainer.py", "meshtrain/parallel/ddp.py", "models/llama.py"} <= plain.keys()
    (tmp_path / "mine.py").write_text((ROOT / "models/llama.py").read_text())
    (tmp_path / "mine.csv").write_text("0F0,0F1,0B0,0B1\n")
    own = topics_of(f"model.name={tmp_path}/mine.py", f"pipeline.schedule={tmp_path}/mine.csv")[
        "the code"
    ].values
    assert own.keys() - plain.keys() == {f"{tmp_path}/mine.py", f"{tmp_path}/mine.csv"}
    assert own[f"{tmp_path}/mine.py"] == plain["models/llama.py"]


def test_versions_and_variables_that_change_results_or_traffic() -> None:
    compared = {
        "NCCL_ALGO": "Ring",
        "GLOO_TIMEOUT": "3",
        "OMP_NUM_THREADS": "1",
        "TORCH_DISTRIBUTED_DEBUG": "OFF",
    }
    others = {
        "HOME": "/root",
        "CUDA_VISIBLE_DEVICES": "1",
        "NCCL_SOCKET_IFNAME": "eth0",
        "TORCHELASTIC_RUN_ID": "7",
    }
    others |= {
        "TORCH_HOME": "/a",
        "CUDA_CACHE_PATH": "/a",
        "CUDA_MPS_PIPE_DIRECTORY": "/a",
        "NCCL_TOPO_FILE": "/a",
    }
    others |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "ENV", "TORCH_LOGS": "+dynamo"}
    topics = topics_of(variables=compared | others)
    assert topics["the environment"].values == compared
    assert not topics["the environment"].refused
    assert {"torch", "python", "numpy"} <= topics["the software"].values.keys()


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.14.1+cu130", "2.14.0a0+git1234"])
def test_torch_that_was_tested(version: str) -> None:
    assert consistency.untested_torch(version) is None


@pytest.mark.parametrize("version", ["2.10.1", "2.15.0a0+git1234", "3.0.0"])
def test_torch_that_was_not_tested(version: str) -> None:
    warning = consistency.untested_torch(version)
    assert warning is not None
    assert warning.startswith(
        f"torch {version} was not tested with this meshtrain, only 2.11 to 2.14 were"
    )


# A job --------------------------------------------------------------------------------------------

DIFFER = """
import os, pathlib, sys
from meshtrain.job import consistency
from meshtrain.train import main

rank, arguments = int(os.environ["RANK"]), sys.argv[1:]
os.chdir(pathlib.Path(__file__).parent / f"host{rank // 2}")
os.environ["LOCAL_RANK"] = str(rank % 2)
os.environ["NCCL_ALGO"] = "Tree" if rank == 1 else "Ring"
if "data.path=code.txt" in arguments and rank == 2:
    plain = consistency.versions
    consistency.versions = lambda: plain() | {"torch": "1.0"}
    arguments.append("optimizer.lr=0.5")
sys.exit(main(arguments))
"""


DIFFERENCES = yaml.safe_load(Path(__file__).with_name("differences.yaml").read_text())


@pytest.mark.parametrize(("kind", "expected"), DIFFERENCES.items(), ids=DIFFERENCES)
def test_a_job_whose_ranks_differ_is_refused_before_anything_is_built(
    kind: str, expected: str, tmp_path: Path
) -> None:
    """Each host has its own copies of model and text. That of the second is another one: of the
    model, where config and versions differ too, of the text, or a damaged one of prepared
    tokens."""
    config = yaml.safe_load((ROOT / QUICKSTART).read_text())
    config["model"]["name"] = "mine.py"
    config["data"] = {"source": "tokens" if kind == "tokens" else "text", "cache": "cache"}
    for number in range(2):
        folder = tmp_path / f"host{number}"
        folder.mkdir()
        other = number == 1
        (folder / "mine.py").write_text(
            (ROOT / "models/llama.py").read_text() + "#" * (other and kind == "code")
        )
        if kind == "tokens":
            ids = np.arange(1, 20_001) % 250
            write(
                folder / "tokens.txt",
                [Document(ids)],
                vocab_size=256,
                tokenizer="mine",
                source="mine",
            )
            ids[15_000 * other or 20_000 :] = 0  # a copy that was interrupted
            (folder / "tokens.txt" / "tokens.bin").write_bytes(ids.astype(np.uint8).tobytes())
        else:
            (folder / f"{kind}.txt").write_text(
                "many words\n" * 2000 + "more\n" * (other and kind == "data")
            )
        (folder / "own.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    (tmp_path / "differ.py").write_text(DIFFER)
    own = [
        *(key for key in SMALL if not key.startswith("data.")),
        "data.seq_len=32",
        f"data.path={kind}.txt",
    ]
    job = forked(3, tmp_path / "differ.py", "own.yaml", *own, f"train.output={tmp_path}/run")
    assert job.status == 2
    host = job.err.split("(host ")[1].split(")")[0]
    printed = job.err.replace(torch.__version__, "VERSION")
    for ranks, word in (("ranks 0-1", "HERE"), ("rank 2", "THERE"), ("rank 0", "FIRST")):
        printed = printed.replace(f"on {ranks} (host {host})", word)
    printed = re.sub(r"\b[\da-f]{12,}\b", "DIGEST", printed)
    assert printed.count(expected) == 1, printed
    assert printed.count("is not the same on all ranks") == expected.count("is not"), "told once"
    assert job.out.count(f"NCCL_ALGO: Ring on ranks 0, 2 (host {host}), Tree on rank 1") == 1
    assert not list(tmp_path.glob("run/*.json*")), "nothing was begun"
