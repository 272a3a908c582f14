"""What a checkpoint was written by, so that a difference can be named when numbers differ later."""

import hashlib
import platform
from importlib import metadata
from pathlib import Path
from types import ModuleType

import torch


def versions(model: ModuleType) -> dict[str, str]:
    """Of meshtrain, torch and Python, and a digest of the code: meshtrain's own and that of the model's file."""
    package = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for path in [*sorted(package.rglob("*.py")), Path(str(model.__file__))]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    try:
        own = metadata.version("meshtrain")
    except metadata.PackageNotFoundError:  # it runs in a clone where nothing was installed
        own = "of a clone"
    return {
        "meshtrain": own,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "code": digest.hexdigest()[:16],
    }
