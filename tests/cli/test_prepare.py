"""`meshtrain prepare` gives the token files of a run's own preparation, to the byte, whoever has
done how much of it; `meshtrain data verify` finds what is no longer what was written."""

import gzip
import json
import multiprocessing
import os
import re
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshtrain.cli.main import main
from meshtrain.config.schema import DataSection
from meshtrain.data import open_data, prepare_data, text, tokens
from meshtrain.data.tokens import Document
from tests.data.test_text import write_lines
from tests.launching import run

FORK = multiprocessing.get_context("fork")
FILES = ("bytes.bin", "checksums.json", "documents.bin", "header.json", "loss.bin", "tokens.bin")
LARGE = 300_000  # characters of one document


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that makes some ten shards: lines, some with a loss mask, files without text, a long
    document."""
    monkeypatch.setattr(text, "LEAST_SHARD", 15_000)
    folder = tmp_path / "corpus"
    folder.mkdir()
    rows = [{"text": f"ü {i} " + "word " * (i % 90)} for i in range(250)]
    write_lines(folder / "a.jsonl", rows)
    write_lines(folder / "b.jsonl", [{"text": ""}] * 900)  # shards without a token
    write_lines(
        folder / "c.jsonl", [{"prompt": f"{i}?", "completion": "yes " * i} for i in range(60)]
    )
    write_lines(folder / "d.jsonl", [{"text": "long " * (LARGE // 5)}])
    write_lines(folder / "e.jsonl", rows)
    return folder


def arguments(corpus: Path, cache: str) -> list[str]:
    data = (
        f"data.path={corpus}",
        "data.tokenizer=bytes",
        f"data.cache={corpus.parent / cache}",
        "data.validation=0.1",
    )
    return ["configs/jsonl.yaml", *data]


def prepare(corpus: Path, cache: str, *options: str) -> int:
    return main(["prepare", *arguments(corpus, cache), *options])


def section(corpus: Path, cache: str) -> DataSection:
    return DataSection(
        source="jsonl",
        path=str(corpus),
        validation=0.1,
        cache=str(corpus.parent / cache),
        seq_len=64,
    )


def prepared(corpus: Path, cache: str) -> Path:
    """The prepared folder; nothing but a lock may be beside it."""
    (folder,) = [
        path for path in (corpus.parent / cache).iterdir() if not path.name.endswith(".lock")
    ]
    return folder


def contents(corpus: Path, cache: str) -> dict[str, bytes]:
    files = {path.name: path.read_bytes() for path in prepared(corpus, cache).iterdir()}
    assert sorted(files) == sorted(FILES)
    return files


def forked_host(corpus: Path, cache: str, *options: str) -> Any:
    """A process that prepares, as on another host."""
    process = FORK.Process(target=lambda: sys.exit(prepare(corpus, cache, *options)))
    process.start()
    return process


@pytest.fixture
def whole(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """What a run without shards makes."""
    with monkeypatch.context() as patch:
        patch.setattr(text, "LEAST_SHARD", 1 << 30)
        prepare_data(section(corpus, "whole"), say=lambda line: None)
    return contents(corpus, "whole")


def test_the_files_are_the_same_whoever_makes_them(
    corpus: Path,
    whole: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(tokens, "_PART", 10_000)
    prepare_data(section(corpus, "own"), say=lambda line: None)
    assert contents(corpus, "own") == whole
    for workers in ("1", "2", "3"):
        assert prepare(corpus, f"by {workers}", "--workers", workers) == 0
        assert contents(corpus, f"by {workers}") == whole
    printed = capsys.readouterr().out
    assert re.search(r"corpus: \d+ shards in 3 processes\nmerging \d+ shards into", printed)
    header = json.loads(whole["header.json"])
    fingerprint = header["fingerprint"]
    assert (
        f"is prepared: 561 documents, {header['tokens']:,} tokens, fingerprint {fingerprint[:16]}"
        in printed
    )
    lines: list[str] = []
    prepare_data(section(corpus, "by 3"), say=lines.append)
    data = open_data(section(corpus, "by 3"), n_outputs=256, seed=0, say=lines.append)
    assert (lines, data.fingerprint) == ([], fingerprint), "a run begins at once"


def test_hosts_may_take_turns_or_work_at_once(
    corpus: Path, whole: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare(corpus, "turns", "--workers", "1", "--host", "1/2") == 0
    assert re.search(
        r"host 1/2 has done its share of .*; the others have \d+ shards to do",
        capsys.readouterr().out,
    )
    assert prepare(corpus, "turns", "--workers", "2", "--host", "0/2") == 0
    assert contents(corpus, "turns") == whole
    hosts = [forked_host(corpus, "at once", "--workers", "2") for _ in range(2)]
    for host in hosts:
        host.join(60)
    assert [host.exitcode for host in hosts] == [0, 0]
    assert contents(corpus, "at once") == whole


def kill_once(monkeypatch: pytest.MonkeyPatch, flag: Path, at: int) -> None:
    """The process that begins shard `at` is killed in it, the first time."""
    plain = text.documents

    def documents(
        source: text.TextSource, shard: list[text.Piece], *how: Any
    ) -> Iterator[Document]:
        for document in plain(source, shard, *how):
            yield document
            if shard == source.shards()[at] and not flag.exists():
                flag.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(text, "documents", documents)


def test_what_a_killed_worker_leaves_is_done_by_the_others(
    corpus: Path,
    whole: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kill_once(monkeypatch, corpus.parent / "killed", 4)
    assert prepare(corpus, "cache", "--workers", "2") == 0
    assert (corpus.parent / "killed").exists()
    assert "a worker has ended with status -9" in capsys.readouterr().err
    assert contents(corpus, "cache") == whole


def test_a_restart_keeps_what_is_finished(
    corpus: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_once(monkeypatch, corpus.parent / "killed", 4)
    doomed = forked_host(corpus, "cache", "--workers", "1")
    doomed.join(60)
    assert doomed.exitcode == -signal.SIGKILL
    (shards,) = (corpus.parent / "cache").glob(".*.shards")
    assert [path.name for path in sorted(shards.glob("[0-9]*"))] == [f"{i:05}" for i in range(4)]
    assert len(list(shards.glob(".00004.*.tmp"))) == 1, "half a shard"
    plain, begun = text.documents, []

    def documents(
        source: text.TextSource, shard: list[text.Piece], *how: Any
    ) -> Iterator[Document]:
        begun.append(source.shards().index(shard))
        return plain(source, shard, *how)

    monkeypatch.setattr(text, "documents", documents)
    prepare_data(section(corpus, "cache"), say=lambda line: None)  # a run does, too
    assert begun == list(range(4, begun[-1] + 1))
    assert contents(corpus, "cache") == whole


def test_a_full_disk_is_said_and_finished_shards_stay(
    corpus: Path, whole: dict[str, bytes]
) -> None:
    def limited() -> None:
        sys.stderr = open(corpus.parent / "error", "w")  # noqa: SIM115
        # what the long document does not get
        resource.setrlimit(resource.RLIMIT_FSIZE, (LARGE // 2, LARGE // 2))
        status = prepare(corpus, "cache", "--workers", "2")
        sys.stderr.close()
        os._exit(status)

    process = FORK.Process(target=limited)
    process.start()
    process.join(60)
    assert process.exitcode == 1
    error = (corpus.parent / "error").read_text()
    assert re.search(
        r"is not prepared: .*File too large.*; \d+ of \d+ shards are finished, and the same "
        r"command",
        error,
    )
    (shards,) = (corpus.parent / "cache").glob(".*.shards")
    assert list(shards.glob("[0-9]*"))
    assert prepare(corpus, "cache", "--workers", "2") == 0
    assert contents(corpus, "cache") == whole


def test_what_is_wrong_ends_it_with_one_sentence(
    corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines(corpus / "e.jsonl", [{"text": "good"}] * 500 + [{"body": "bad"}])
    for options in (["--workers", "1"], ["--workers", "3"]):
        assert prepare(corpus, "cache", *options) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert "corpus/e.jsonl:501: expected an object with the key `text`" in err
    assert prepare(corpus, "cache", "--workers", "0") == 2
    for share in ("2/2", "1", "-1/2", "a/b"):
        with pytest.raises(SystemExit, match="2"):
            prepare(corpus, "cache", f"--host={share}")
    assert main(["prepare", "configs/digits.yaml"]) == 2
    assert (
        "data.source digits is read as it is: python-stdlib, text, jsonl, parquet or hub"
        in capsys.readouterr().err
    )


MEASURED = """
import sys
from meshtrain.config.schema import DataSection
from meshtrain.data.prepare import preparations
for source, path in (("text", "x.txt"), ("jsonl", "x.jsonl"), ("jsonl", "x.jsonl.gz")):
    for preparation in preparations(DataSection(source=source, path=path, tokenizer="bytes", validation=0, cache="cache")):
        assert preparation.run(print)
    peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
    print("MiB", int(peak) >> 10, "torch" in sys.modules)
"""


def test_memory_does_not_grow_with_the_files(tmp_path: Path) -> None:
    line = "Some words of a text, with a comma; and then 3 more of them. "
    (tmp_path / "x.txt").write_text(line * (60_000_000 // len(line)))  # one document
    row = json.dumps({"text": line * 8000}) + "\n"
    (tmp_path / "x.jsonl").write_text(row * (60_000_000 // len(row)))
    (tmp_path / "x.jsonl.gz").write_bytes(
        gzip.compress((row * (60_000_000 // len(row))).encode(), 1)
    )
    out = run([sys.executable, "-c", MEASURED], cwd=tmp_path).check().out
    peaks = [int(peak) for peak, torch in re.findall(r"MiB (\d+) (\w+)", out) if torch == "False"]
    assert len(peaks) == 3
    assert max(peaks) < 110


# Verifying


def verify(corpus: Path, cache: str, *more: str) -> int:
    return main(["data", "verify", *arguments(corpus, cache), *more])


def test_a_damaged_block_is_found(
    corpus: Path,
    whole: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(tokens, "BLOCK", 5000)
    assert verify(corpus, "cache") == 2
    assert re.search(
        r"there is no folder .*cache.* yet: `meshtrain prepare", capsys.readouterr().err
    )
    assert prepare(corpus, "cache", "--workers", "2") == 0
    assert verify(corpus, "cache") == 0
    assert capsys.readouterr().out.endswith(": intact\n")
    folder = prepared(corpus, "cache")
    for name, at in (
        ("tokens.bin", 12_345),
        ("loss.bin", 12_345),
        ("bytes.bin", len(whole["bytes.bin"]) - 1000),
    ):
        damaged = bytearray(whole[name])
        damaged[at] ^= 1
        (folder / name).write_bytes(damaged)
        assert main(["data", "verify", str(folder)]) == 1
        (folder / name).write_bytes(whole[name])
        block = at // 5000 * 5000
        problem = (
            f"bytes {block:,} to {min(block + 5000, len(damaged)):,} are not those that were "
            "written"
        )
        printed = capsys.readouterr().out
        assert "1 problem\n" in printed
        assert printed.endswith(f"{name}: {problem}\n")
    assert verify(corpus, "cache") == 0
    os.truncate(folder / "tokens.bin", 100)
    assert verify(corpus, "cache") == 1
    (folder / "tokens.bin").write_bytes(whole["tokens.bin"])
    (folder / "checksums.json").write_text("{")
    assert verify(corpus, "cache") == 1
    assert "checksums.json is damaged" in capsys.readouterr().out


def test_folders_of_an_older_meshtrain_are_read_and_looked_at(
    corpus: Path, whole: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = prepared(corpus, "whole")
    (folder / "checksums.json").unlink()
    assert open_data(section(corpus, "whole"), n_outputs=256, seed=0, say=print).fingerprint
    assert verify(corpus, "whole") == 0
    assert "no checksums, an older meshtrain has written it" in capsys.readouterr().out
    raw = bytearray(whole["tokens.bin"])
    raw[-5] = 255
    (folder / "tokens.bin").write_bytes(raw)
    assert verify(corpus, "whole") == 1
    assert "holds the token id 255, and its header says that" in capsys.readouterr().out
    assert main(["data", "verify", str(corpus)]) == 2
    assert "is not a folder of prepared tokens" in capsys.readouterr().err


def test_of_a_mixture_what_has_token_files_is_verified(
    corpus: Path, whole: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    megatron = "{name: theirs, source: megatron, path: theirs}"
    ours = f"{{name: ours, path: {corpus}}}"
    command = ["data", "verify", *arguments(corpus, "whole"), "data.path=null"]
    assert main([*command, f"data.sources=[{ours}, {megatron}]"]) == 0
    assert re.fullmatch(
        r"theirs: left out, as megatron .*\n.*whole/.*: intact\n", capsys.readouterr().out
    )
    assert main([*command, f"data.sources=[{megatron}]"]) == 2
    assert "there is nothing to verify" in capsys.readouterr().err
