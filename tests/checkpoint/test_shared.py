"""Every host has to see what rank 0 wrote. Here ranks are threads that meet at a store in
memory."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshtrain.errors import InputError
from meshtrain.job.environment import Environment
from meshtrain.job.process import Job
from meshtrain.run import run_folder as shared
from meshtrain.run.run_folder import check_shared_filesystem


def prove(folders: list[Path], hosts: list[str]) -> list[str | None]:
    """What each rank is told; rank i is on host i and sees folder i under the name that all use."""
    store = dist.HashStore()
    local = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
    jobs = [
        Job(
            Environment("torchrun", rank, len(hosts), local[rank], hosts[rank], None),
            torch.device("cpu"),
            store,
        )
        for rank in range(len(hosts))
    ]

    def one(rank: int) -> str | None:
        try:
            check_shared_filesystem(jobs[rank], folders[rank])
        except InputError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(len(hosts)) as threads:
        return list(threads.map(one, range(len(hosts))))


def test_a_folder_that_all_hosts_see(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "a")
    assert prove([tmp_path / "a", tmp_path / "a", link], ["x", "x", "y"]) == [None] * 3
    assert not list((tmp_path / "a").iterdir()), "nothing is left"


def test_a_folder_of_one_host_is_refused_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "LOOK_FOR_S", 0.2)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / shared.PROOF).write_text("an older token, which proves nothing")
    errors = prove([tmp_path / name for name in "aaabc"], ["x", "x", "z", "y", "w"])
    assert None not in errors
    problem = (
        f"{tmp_path}/a, is not shared: what rank 0 on host x wrote there is not seen on host y, w"
    )
    assert problem in str(errors[0])
    assert "checkpoint.path=FOLDER" in str(errors[0])
    assert len({str(text).replace("/b", "/a").replace("/c", "/a") for text in errors}) == 1


def test_links_under_the_names_of_the_proof_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    other = tmp_path / "of_somebody_else"
    other.write_text("text")
    for name in (shared.PROOF, f".{shared.PROOF}.tmp"):
        (tmp_path / "a" / name).symlink_to(other)
    assert prove([tmp_path / "a"] * 2, ["x", "y"]) == [None] * 2
    assert other.read_text() == "text"
    assert not list((tmp_path / "a").iterdir())


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    errors = prove([tmp_path / "file"] * 2, ["x", "y"])
    assert errors[0] == errors[1]
    assert "cannot be written to (" in str(errors[0])
