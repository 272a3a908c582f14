"""Finds the files of a run: configs, models, hardware files, data, and a user's own Python files.

Models are loaded by path, so that `models/` need not be an importable package. In the repository it
is next to the package; an installed wheel has it inside the package, in `bundled/`.
"""

import hashlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from meshtrain.errors import InputError

_PACKAGE = Path(__file__).resolve().parents[1]


def bundled(kind: str) -> Path:
    """The folder of the project's own `models`, `configs`, `hardware`, `docs` or `tools/slurm`."""
    inside = _PACKAGE / "bundled" / kind
    return inside if inside.is_dir() else _PACKAGE.parent / kind


def names(kind: str, suffix: str) -> list[str]:
    """The names of the project's own models (`.py`), configs or hardware files (`.yaml`),
    sorted."""
    return sorted(path.stem for path in bundled(kind).glob(f"*{suffix}"))


def config_path(name: str) -> Path:
    """The YAML file of `name`: a path, or the name of one of the project's own configs.

    `configs/quickstart.yaml` also works outside the repository. Raises FileNotFoundError, with the
    names that exist.
    """
    path = Path(name)
    if path.is_file():
        return path
    own = bundled("configs") / f"{path.stem}.yaml"
    may_be_own = path.suffix in ("", ".yaml", ".yml") and str(path.parent) in (".", "configs")
    if may_be_own and own.is_file():
        return own
    known = [f"configs/{stem}.yaml" for stem in names("configs", ".yaml")]
    raise FileNotFoundError(
        f"there is no config {name} (looked at {path.absolute()}); meshtrain's own are: "
        f"{', '.join(known)}"
    )


def data_files(source: str, path: str) -> list[str]:
    """The files that a path of a `data.source` names: for `megatron` the pair of its prefix, or of
    either file, and none for what lies elsewhere: on the hub, or in object storage."""
    if source == "hub" or "://" in path:
        return []
    if source != "megatron":
        return [path]
    prefix = path[:-4] if path.endswith((".bin", ".idx")) else path
    return [f"{prefix}.bin", f"{prefix}.idx"]


def code() -> dict[str, str]:
    """The Python files of meshtrain and of its models -> a digest of each."""
    digests = {}
    for name, folder in (("meshtrain", _PACKAGE), ("models", bundled("models"))):
        for path in sorted(folder.rglob("*.py")):
            digests[f"{name}/{path.relative_to(folder).as_posix()}"] = digest(path)
    return digests


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def model_file(name: str) -> ModuleType:
    """The module of one of the project's models (`llama`), or of a user's file (a path). Raises as
    `python_file`."""
    own = bundled("models") / f"{name}.py"
    if own.is_file():
        return python_file(own)
    if not name.endswith(".py"):
        raise FileNotFoundError(
            f"there is no model called {name!r}; meshtrain's own are: "
            f"{', '.join(names('models', '.py'))}; a model of your own is named by the path of its "
            "file, which ends in .py"
        )
    return _users_python_file(Path(name))


def users_file(key: str, path: str) -> ModuleType:
    """The module of a user's file, which a key names. Raises InputError: there is none, or it
    raises something."""
    try:
        return _users_python_file(Path(path))
    except FileNotFoundError as error:
        raise InputError(f"{key}: {error}") from error
    except (Exception, SystemExit) as error:
        raise InputError(f"{key}: {path} cannot be used: {raised(error)}") from error


def raised(error: BaseException) -> str:
    """Words for an error that a user's file raised, with the line."""
    return f"it raises {type(error).__name__}: {error} ({line_of(error)})"


def line_of(error: BaseException) -> str:
    """Where an error was raised, as `file:line`."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{place.filename}:{place.lineno}"


def _users_python_file(path: Path) -> ModuleType:
    """`python_file` of a file that may import those beside it, as a script may, whichever command
    loads it."""
    folder = str(path.expanduser().resolve().parent)
    if folder not in sys.path:
        # Last: nothing there takes the place of an installed package.
        sys.path.append(folder)
    return python_file(path)


def python_file(path: Path) -> ModuleType:
    """Loads a Python file, once. Raises FileNotFoundError: no such file; also whatever the file
    itself raises."""
    path = path.expanduser().resolve()
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    # A unique name per path: two users' files may both be called model.py.
    name = f"meshtrain_file_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # the file exists
    assert spec.loader is not None  # and its name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module while the class is created
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
