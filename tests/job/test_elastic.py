"""What a worker knows of earlier starts, and what it says of later ones."""

import threading
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from meshtrain.checkpoint.directory import lock_folder as locked
from meshtrain.config import Config, ConfigErrors
from meshtrain.config.layout_advice import world_sizes_text
from meshtrain.errors import InputError
from meshtrain.job.environment import already_printed, read_environment, stale_store, started_before
from meshtrain.job.process import Job, _own_address
from meshtrain.run.run_folder import RunFolder
from tests.launching import ROOT


def worker(agent: Path, attempt: int, local_rank: int = 0) -> Mapping[str, str]:
    """What torchrun gives a worker: its error file is in a folder of this attempt in a folder of this agent."""
    file = agent / f"attempt_{attempt}" / str(local_rank) / "error.json"
    return {"LOCAL_RANK": str(local_rank), "TORCHELASTIC_ERROR_FILE": str(file)}


def test_a_worker_is_started_again_whatever_its_launcher_counts(tmp_path: Path) -> None:
    assert not started_before(worker(tmp_path, 0, 0))
    assert not started_before(worker(tmp_path, 0, 1)), "another worker of the first start"
    assert started_before(worker(tmp_path, 0, 0)), "a node has joined: the attempt is not counted"
    assert started_before(worker(tmp_path, 1, 1))


@pytest.mark.parametrize("file", ["", "/tmp/error.json", "error.json"])
def test_without_an_agents_folder_nothing_is_known(file: str) -> None:
    variables = {"TORCHELASTIC_ERROR_FILE": file}
    for _ in range(2):
        assert not started_before(variables)
        assert not already_printed("wrong", variables)
    assert not started_before({})


def test_an_input_error_is_told_once_and_another_one_too(tmp_path: Path) -> None:
    assert not already_printed("the layout does not fit 3", worker(tmp_path, 0))
    assert already_printed("the layout does not fit 3", worker(tmp_path, 1))
    assert not already_printed("the layout does not fit 2", worker(tmp_path, 2))


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"dp_shard": -1}, "any number can form it"),
        ({"dp_shard": -1, "tp": 4}, "4, 8, 12, ... processes can form it"),
        ({"dp_shard": 4}, "4 processes can form it, and with dp_shard: -1 any number can"),
        ({"dp_replicate": 2, "tp": 2}, "4 processes can form it, and with dp_replicate: -1 2, 4, 6, ... processes can"),
        ({"pp": 2}, "2 processes can form it, and with dp_shard: -1 2, 4, 6, ... processes can"),
        (
            {"dp_replicate": 2, "dp_shard": 3},
            "6 processes can form it, and with dp_shard: -1 2, 4, 6, ... processes can",
        ),
    ],
)
def test_which_worlds_a_layout_can_be_made_of(sizes: dict[str, int], said: str) -> None:
    assert world_sizes_text(sizes) == said


def test_experts_fold_into_the_worlds_that_are_named() -> None:
    assert world_sizes_text({"dp_shard": -1, "tp": 2}, 8) == "8, 16, 24, ... processes can form it"
    expected = "32 processes can form it, and with dp_shard: -1 8, 16, 32, ... processes can"
    assert world_sizes_text({"dp_replicate": 2, "dp_shard": 8, "tp": 2}, 8) == expected
    assert world_sizes_text({"dp_replicate": 2, "dp_shard": -1}, 2).startswith("2, 4, 8, ... processes")


def test_a_job_that_was_started_again_is_told_which_worlds_would_do() -> None:
    def refused(again: bool) -> str:
        with pytest.raises(ConfigErrors) as found:
            Config.load(str(ROOT / "configs/quickstart.yaml"), ["layout={dp_shard: 4}"], world_size=3, again=again)
        return str(found.value)

    assert "This job was started again with 3: 4 processes can form it, and with dp_shard: -1" in refused(True)
    assert "started again" not in refused(False)


def test_ranks_that_do_not_meet_are_told_of_torchruns_store() -> None:
    several = {"TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_WORLD_SIZE": "2"}
    assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in stale_store(several)
    for other in ({}, several | {"GROUP_WORLD_SIZE": "1"}, several | {"TORCHELASTIC_USE_AGENT_STORE": "False"}):
        assert stale_store(other) == ""


def test_where_gloo_would_listen() -> None:
    assert _own_address("localhost") in ("127.0.0.1", "::1")
    assert _own_address("192.0.2.1") is None, "nobody's address, by RFC 5737"


def test_a_job_that_was_started_again_waits_for_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one before held it on a host that is cut off, and does not know yet that it has been lost."""
    first, again = (Job(read_environment({}), torch.device("cpu"), None, again=again) for again in (False, True))
    folder = RunFolder(tmp_path)
    with ExitStack() as before:
        before.enter_context(locked(tmp_path))
        with (
            pytest.raises(InputError, match=r"in use by process.*remove .*/\.lock, which breaks"),
            folder.lock(first, 9),
        ):
            pass
        lets_go = threading.Timer(0.7, before.pop_all().close)
        lets_go.start()
        with folder.lock(again, 9):
            lets_go.join()
    assert capsys.readouterr().out.count("starting: the folder") == 1, "it says why it waits, once"
    with locked(tmp_path), pytest.raises(InputError, match="in use by process"), folder.lock(again, 0.2):
        pass
