"""`meshtrain new DIR`: a starter project (model, data, config, SLURM script and test) that trains
as it is."""

import argparse
import shlex
import shutil
from pathlib import Path

from meshtrain.errors import InputError
from meshtrain.job import locate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="a new folder, or an empty one")


def run(arguments: argparse.Namespace) -> None:
    folder = arguments.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise InputError(f"{folder} has files in it, which stay as they are: name a new folder")
        starter = sorted(locate.bundled("tools/starter").iterdir())
        files = [path for path in starter if path.is_file()]
        for path in files:
            shutil.copyfile(path, folder / path.name)
        shutil.copyfile(locate.bundled("tools/slurm") / "train.sbatch", folder / "job.sbatch")
    except OSError as error:
        raise InputError(
            f"{folder} cannot be made ({error.strerror}): name another folder"
        ) from error
    names = [path.name for path in files] + ["job.sbatch"]
    print(f"{folder}: {', '.join(names)}")
    print(f"  cd {shlex.quote(str(folder))}")
    print("  python -m meshtrain.train train.yaml")
    print("  python test_model.py")
