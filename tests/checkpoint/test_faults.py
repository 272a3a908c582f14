"""Faults of checkpoints, a row each (faults.py): damaged files, reads that fail, and saves that fail."""

import errno
import os
import shutil

import pytest

from meshtrain.checkpoint.directory import COMPLETE
from meshtrain.checkpoint.manifest import MANIFEST, MAX_BYTES
from tests.checkpoint import faults
from tests.checkpoint.faults import (
    AT_REST,
    LOADING,
    NEWER,
    OLDER,
    SAVING,
    SHARD,
    Row,
    Run,
    before,
    both,
    check,
    damaged,
    failing,
    flip_a_bit,
    link,
    roomy,
    seal,
    small_disk,
    take,
    write_manifest,
)
from tests.checkpoint.going_on import Crash

NO_FIT = f"{MANIFEST}: and {COMPLETE} do not fit together"
DAMAGE = {
    "a flipped bit": (flip_a_bit, f"{SHARD}: model.embed.weight: its bytes 0 to 8,192 are not those"),
    "a shard cut short": (lambda at: os.truncate(at / SHARD, 9999), f"{SHARD}: has 9,999 bytes;"),
    "an empty shard": (lambda at: os.truncate(at / SHARD, 0), f"{SHARD}: has 0 bytes;"),
    "a shard that grew": (lambda at: (at / SHARD).open("ab").write(b"x"), "bytes; "),
    "a missing shard": (lambda at: (at / SHARD).unlink(), f"{SHARD}: is missing"),
    "a shard that is a link": (link(SHARD), f"{SHARD}: is a link"),
    "a shard that is a pipe": (faults.pipe, f"{SHARD}: is no file"),
    "a header of 2^60 bytes": (
        faults.huge_header,
        f"{SHARD}: its header would have 1,152,921,504,606,846,976 bytes",
    ),
    "a shard that is a pickle": (faults.pickled, f"{SHARD}: "),
    "a shard of another step": (
        lambda at: shutil.copy(at.parent / OLDER / SHARD, at / SHARD),
        f"{SHARD}: its header or its checksums are not those",
    ),
    "no manifest": (lambda at: (at / MANIFEST).unlink(), f"{MANIFEST}: is missing"),
    "an empty manifest": (lambda at: os.truncate(at / MANIFEST, 0), f"{MANIFEST}: is empty"),
    "an empty manifest that fits": (lambda at: write_manifest(at, b""), f"{MANIFEST}: is empty"),
    "a manifest cut short": (lambda at: os.truncate(at / MANIFEST, 100), NO_FIT),
    "a large manifest": (lambda at: os.truncate(at / MANIFEST, 2 * MAX_BYTES), f"at most {MAX_BYTES:,}"),
    "a manifest that names ../../x": (lambda at: seal(at, files={"../../x": {}}), "'../../x'"),
    "a manifest that is a pickle": (
        lambda at: write_manifest(at, b"\x80\x04cos\nsystem\n."),
        f"{MANIFEST}: is no JSON",
    ),
    "a manifest of another step": (lambda at: seal(at, step=5), f"{MANIFEST}: is that of step 5"),
    "a manifest that is a link": (link(MANIFEST), f"{MANIFEST}: is a link"),
    "no COMPLETE": (lambda at: (at / COMPLETE).unlink(), "was never written to its end"),
    "an empty COMPLETE": (lambda at: os.truncate(at / COMPLETE, 0), NO_FIT),
    "a COMPLETE that says more": (lambda at: (at / COMPLETE).open("a").write(" "), NO_FIT),
    "a large COMPLETE": (lambda at: os.truncate(at / COMPLETE, 2000), f"{COMPLETE}: has 2,000 bytes; at most 1,000"),
    "a COMPLETE that is a link": (link(COMPLETE), f"{COMPLETE}: is a link"),
}
ROWS = {name: Row(damaged(harm), AT_REST, says) for name, (harm, says) in DAMAGE.items()}
ROWS["a newer format"] = Row(
    damaged(lambda at: seal(at, format=3)), AT_REST, "format 3, and this meshtrain", status=2, steps=(2, 4)
)

# Reads that fail: for a while, or until the fault is over.
IT_READS = "goes on from {newest}: step 4"
for number in (errno.EIO, errno.ESTALE, errno.EACCES, errno.EMFILE, errno.ENOMEM, errno.ETIMEDOUT, errno.ENOENT):
    ROWS[f"{os.strerror(number)}, twice"] = Row(
        failing("os.open", number, f"{NEWER}/{SHARD}", times=2), LOADING, IT_READS
    )
for function, file in (("os.open", SHARD), ("os.open", MANIFEST), ("os.lstat", COMPLETE)):
    ROWS[f"{file} cannot be read"] = Row(
        failing(function, errno.ESTALE, f"{NEWER}/{file}"),
        LOADING,
        f"host here cannot read {{newest}}/{file}: Stale file handle",
        status=1,
        steps=(2, 4),
    )
TOKENS = "meshtrain.data.fingerprint.open"
ROWS |= {
    "data cannot be sampled, twice": Row(failing(TOKENS, errno.EIO, "tokens.bin", times=2), LOADING, IT_READS),
    "data cannot be sampled": Row(
        failing(TOKENS, errno.EIO, "tokens.bin"),
        LOADING,
        "tokens.bin: Input/output error",
        status=1,
        steps=(2, 4),
    ),
    "a folder that cannot be listed is not an empty one": Row(
        failing("os.scandir", errno.EIO, "/checkpoints"),
        LOADING,
        "cannot read {checkpoints}: Input/output error",
        status=1,
        steps=(2, 4),
    ),
    "what is damaged cannot be set aside": Row(
        both(damaged(flip_a_bit), failing("meshtrain.checkpoint.resume.set_aside", errno.EACCES)),
        LOADING,
        "setting later checkpoints aside: host here: [Errno 13] Permission denied",
        status=1,
        steps=(2, 4),
    ),
}

# Saves that fail.
WRITE = "meshtrain.checkpoint.commit.write_shard"
NO_THREAD = RuntimeError("can't start new thread")
MAKE_ROOM = ("checkpoint.make_room=true", "checkpoint.keep_last=2")
MADE_ROOM = "step_0000002 was deleted before step 6 was saved: the disk is full"
ROWS |= {
    name: Row(fault, SAVING, says, status=1, steps=(2, 4), options=options)
    for name, (fault, says, options) in {
        "a full disk": (small_disk, "6 steps of 6 are done and not saved: it needs ", ()),
        "a full disk says where": (small_disk, "the file system of {checkpoints} has ", ()),
        "a disk that gets full": (
            both(small_disk, roomy),
            f"{{checkpoints}}/.step_0000006.tmp/{SHARD}: No space left on device",
            (),
        ),
        "no room is made by what stays": (small_disk, "it needs ", ("checkpoint.make_room=true",)),
        "only a full disk asks for room": (failing(WRITE, errno.EIO, times=1), "Input/output error", MAKE_ROOM),
        "a disk that becomes read-only": (
            failing("meshtrain.checkpoint.directory.begin_local", errno.EROFS),
            "rank 0 on host here (dp_shard 0): {checkpoints}: Read-only file system",
            (),
        ),
        "no memory for a file": (failing(WRITE, MemoryError()), "rank 0 on host here (dp_shard 0): MemoryError", ()),
        "no thread for checksums": (
            failing("threading.Thread.start", NO_THREAD, "Thread(crc32"),
            f"{{checkpoints}}/.step_0000006.tmp/{SHARD}: can't start new thread",
            (),
        ),
        "checkpoint.on_failure": (
            failing(WRITE, errno.EIO, times=1),
            "there is no checkpoint of step 6: rank 0 on host here ",
            ("train.steps=8", "checkpoint.on_failure=stop", "checkpoint.in_background=false"),
        ),
        "another job takes the folder": (
            before("meshtrain.checkpoint.directory.begin", lambda run: take(run.checkpoints)),
            "the folder {checkpoints} was taken by another job meanwhile (process 7 on host b)",
            ("train.steps=8", "checkpoint.in_background=false"),
        ),
    }.items()
}
ROWS |= {
    "the next save is well again": Row(
        failing(WRITE, errno.EIO, times=1),
        SAVING,
        "training goes on, and the checkpoints before it are there",
        steps=(2, 4, 8),
        options=("train.steps=8",),
    ),
    "no thread for a save": Row(
        failing("threading.Thread.start", NO_THREAD, "Thread(checkpoint,", times=1),
        SAVING,
        "warning: training waited for the checkpoint of step 6: can't start new thread",
        steps=(2, 4, 6),
    ),
    "what is in the way is kept": Row(
        lambda run, _: (run.checkpoints / "step_0000006").mkdir(),
        SAVING,
        "step_0000006 was in the way of a new checkpoint and is step_0000006.aside-1 now",
        steps=(2, 4, 6),
    ),
    "room is made before": Row(small_disk, SAVING, MADE_ROOM, steps=(4, 6), options=MAKE_ROOM),
    "room is made meanwhile": Row(both(small_disk, roomy), SAVING, MADE_ROOM, steps=(4, 6), options=MAKE_ROOM),
    "room is made in a quota": Row(
        failing(WRITE, errno.EDQUOT, times=1), SAVING, MADE_ROOM, steps=(4, 6), options=MAKE_ROOM
    ),
    "room that is made may not suffice": Row(
        failing(WRITE, errno.EDQUOT), SAVING, "Disk quota exceeded", status=1, steps=(4,), options=MAKE_ROOM
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_fault(run: Run, name: str) -> None:
    check(ROWS[name], run)


def test_no_memory_for_the_manifest_is_a_failed_save(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    failing("meshtrain.checkpoint.commit.Manifest", MemoryError())(run, monkeypatch)
    assert "are done and not saved: rank 0 on host here (dp_shard 0): MemoryError" in run.train(status=1)


def test_a_fault_of_the_program_ends_the_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would come again with each save."""
    failing(WRITE, Crash("unforeseen"))(run, monkeypatch)
    assert run.train(status=1).endswith("unforeseen")
