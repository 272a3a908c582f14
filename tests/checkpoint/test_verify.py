"""`verify` finds every flipped bit and says where; it does not need torch."""

import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from meshtrain.checkpoint.directory import COMPLETE, begin, finish
from meshtrain.checkpoint.manifest import MANIFEST, Manifest, file_of
from meshtrain.checkpoint.shard_file import write_shard
from meshtrain.checkpoint.verify import Problem, verify
from meshtrain.huggingface.safetensors import Entry
from tests.checkpoint.by_hand import flip, write_checkpoint

FLIPS = 1000
SIZES = {"pp": 2, "dp_shard": 2}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four shards of two and three tensors, with more data than header."""
    generator = torch.Generator().manual_seed(0)
    tensors = {f"model.{i}": torch.randn(64, 50 + i, generator=generator) for i in range(5)}
    return write_checkpoint(
        tmp_path_factory.mktemp("verify"),
        tensors | {"model.5": torch.tensor(3.0)},
        sizes=SIZES,
        cuts=lambda name, tensor: (("dp_shard", 0),) if tensor.dim() else (),
        stages=lambda name: (int(name[-1]) % 2,),
    )


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / checkpoint.name))


def test_all_of_1000_random_flipped_bits_are_found_and_the_file_named(copy: Path) -> None:
    """And all bits of COMPLETE, which is small."""
    files = sorted(copy.iterdir())
    assert len(files) == 6
    rng = random.Random(0)
    chosen = rng.choices(files, weights=[path.stat().st_size for path in files], k=FLIPS)
    assert set(chosen) >= {path for path in files if path.name != COMPLETE}
    bits = [(path, rng.randrange(8 * path.stat().st_size)) for path in chosen]
    bits += [(copy / COMPLETE, bit) for bit in range(8 * (copy / COMPLETE).stat().st_size)]
    for path, bit in bits:
        flip(path, bit)
        problems = verify(copy)
        flip(path, bit)
        # The manifest's checksum is in COMPLETE: where they do not fit together, either may be the
        # damaged one.
        expected = MANIFEST if path.name == COMPLETE else path.name
        assert [problem.file for problem in problems] == [expected], f"bit {bit} of {path.name}"
    assert verify(copy) == []


def test_each_damaged_tensor_of_each_file_is_named(copy: Path) -> None:
    first, second = copy / file_of(0), copy / file_of(3)
    flip(first)
    flip(first, -8 * 32 * 54 * 4 - 1)  # in the tensor before the last
    second.unlink()
    problems = verify(copy)
    assert [(problem.file, problem.tensor) for problem in problems] == [
        (first.name, "model.2"),
        (first.name, "model.4"),
        (second.name, None),
    ]
    assert (
        str(problems[0])
        == "rank_00000.safetensors: model.2: its bytes 0 to 6,656 are not those that were written"
    )
    assert str(problems[2]) == "rank_00003.safetensors: is missing"


def test_a_shard_that_is_whole_and_not_what_the_manifest_says(tmp_path: Path) -> None:
    """Whoever wrote it was wrong: the checksums fit, and a tensor is missing, another unknown, one
    of another shape."""
    whole = write_checkpoint(tmp_path, {"model.a": torch.zeros(4), "model.b": torch.zeros(4)})
    manifest = Manifest.parse((whole / MANIFEST).read_text(), whole / MANIFEST)
    unfinished = begin(tmp_path, 200)
    tensors = [
        (Entry("model.b", "F32", (2, 2)), memoryview(bytes(16))),
        (Entry("x", "U8", (1,)), memoryview(b"1")),
    ]
    file = write_shard(unfinished / file_of(0), tensors)
    about = {name: value for name, value in vars(manifest).items() if name not in ("files", "step")}
    other = finish(tmp_path, 200, Manifest(files={file_of(0): file}, step=200, **about).to_json())
    assert verify(other) == [
        Problem(file_of(0), "model.a", "is not in the file, and by the manifest it should be"),
        Problem(file_of(0), "model.b", "is F32 [2, 2], and by the manifest F32 [4]"),
        Problem(file_of(0), "x", "is in the file, and by the manifest it should not be"),
    ]


def test_it_does_not_import_torch(checkpoint: Path) -> None:
    """Nor numpy: in a process of its own, through the command."""
    code = (
        "import sys\nfrom meshtrain.cli.main import main\n"
        f"status = main(['checkpoint', 'verify', {str(checkpoint)!r}])\n"
        "print(status, sorted({'torch', 'numpy'} & set(sys.modules)))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout.splitlines() == [f"{checkpoint}: intact", "0 []"]
