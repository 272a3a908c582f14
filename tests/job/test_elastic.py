"""What a worker knows of earlier starts, and what it says of later ones."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from meshtrain.checkpoint.folder_lock import lock_folder
from meshtrain.config import Config, ConfigErrors
from meshtrain.config.layout_advice import world_sizes_text
from meshtrain.errors import InputError
from meshtrain.job.environment import already_printed, read_environment, stale_store, started_before
from meshtrain.job.process import Job, _own_address
from meshtrain.run import run_folder
from meshtrain.run.run_folder import RunFolder
from tests.launching import ROOT


def worker(agent: Path, attempt: int, local_rank: int = 0) -> Mapping[str, str]:
    """What torchrun gives a worker: its error file is in a folder of this attempt in a folder of
    this agent."""
    file = agent / f"attempt_{attempt}" / str(local_rank) / "error.json"
    return {"LOCAL_RANK": str(local_rank), "TORCHELASTIC_ERROR_FILE": str(file)}


def test_a_worker_is_started_again_whatever_its_launcher_counts(tmp_path: Path) -> None:
    assert not started_before(worker(tmp_path, 0, 0))
    assert not started_before(worker(tmp_path, 0, 1)), "another worker of the first start"
    assert started_before(worker(tmp_path, 0, 0)), "a node has joined: the attempt is not counted"
    assert started_before(worker(tmp_path, 1, 1))
    assert not already_printed("the layout does not fit 3", worker(tmp_path, 0))
    assert already_printed("the layout does not fit 3", worker(tmp_path, 1))
    assert not already_printed("the layout does not fit 2", worker(tmp_path, 2))


@pytest.mark.parametrize("file", ["", "/tmp/error.json", "error.json", None])
def test_without_an_agents_folder_nothing_is_known(file: str | None) -> None:
    variables = {} if file is None else {"TORCHELASTIC_ERROR_FILE": file}
    for _ in range(2):
        assert not started_before(variables)
        assert not already_printed("wrong", variables)


def test_which_worlds_a_layout_can_be_made_of() -> None:
    for case in yaml.safe_load(Path(__file__).with_name("world_sizes.yaml").read_text()):
        assert world_sizes_text(case["sizes"], case.get("experts", 1)) == case["text"], case


def test_a_job_that_was_started_again_is_told_which_worlds_would_do() -> None:
    def refusal(again: bool) -> str:
        with pytest.raises(ConfigErrors) as caught:
            Config.load(
                str(ROOT / "configs/quickstart.yaml"),
                ["layout={dp_shard: 4}"],
                world_size=3,
                again=again,
            )
        return str(caught.value)

    assert (
        "This job was started again with 3: 4 processes can form it, and with dp_shard: -1"
        in refusal(True)
    )
    assert "started again" not in refusal(False)


def test_ranks_that_do_not_meet_are_told_of_torchruns_store() -> None:
    several = {"TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_WORLD_SIZE": "2"}
    assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in stale_store(several)
    for other in (
        {},
        several | {"GROUP_WORLD_SIZE": "1"},
        several | {"TORCHELASTIC_USE_AGENT_STORE": "False"},
    ):
        assert stale_store(other) == ""


def test_where_gloo_would_listen() -> None:
    assert _own_address("localhost") in ("127.0.0.1", "::1")
    assert _own_address("192.0.2.1") is None, "nobody's address, by RFC 5737"


def test_a_job_that_was_started_again_waits_for_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one before held it on a host that is cut off, and does not know yet that it has been
    lost."""
    first, again = (
        Job(read_environment({}), torch.device("cpu"), None, again=again) for again in (False, True)
    )
    folder, printed, before = RunFolder(tmp_path), [], ExitStack()
    before.enter_context(lock_folder(tmp_path))

    def let_go(text: str, **_: Any) -> None:
        printed.append(text)
        before.close()

    monkeypatch.setattr(run_folder, "print", let_go, raising=False)
    with (
        pytest.raises(InputError, match=r"in use by process.*remove .*/\.lock, which breaks"),
        folder.lock(first),
    ):
        pass
    with monkeypatch.context() as hurry:
        hurry.setattr(run_folder, "LOCK_WAIT_S", 0.0)
        with pytest.raises(InputError, match="in use"), folder.lock(again):
            pass
    with folder.lock(again):
        (reason,) = printed
    assert reason.startswith("starting: the folder"), "it says why it waits"
