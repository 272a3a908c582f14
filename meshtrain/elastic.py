"""What a worker knows of those that its launcher started before it in the same job.

torchrun counts failures, not starts: when a node joins, it ends all workers and starts them again with the count that
they had, and the agent of a node that joins begins at 0. So a worker leaves its marks in the folder that its agent has
made for the error files of its workers: the agent keeps it over all starts, and no other agent has it.
"""

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path

from meshtrain.layout import DATA_AXES

OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"  # set to 1, torchrun opens a store for each start of the workers


def started_before(variables: Mapping[str, str]) -> bool:
    """Whether this worker's agent has started this local rank before; from now on it has."""
    folder = _of_agent(variables)
    if folder is None:
        return False
    mark = folder / f"started_{variables.get('LOCAL_RANK', '0')}"
    before = mark.exists()
    mark.touch()
    return before


def told_before(text: str, variables: Mapping[str, str]) -> bool:
    """Whether a worker of this agent has told the user the very same before; from now on one has."""
    folder = _of_agent(variables)
    if folder is None:
        return False
    digest, mark = hashlib.sha256(text.encode()).hexdigest(), folder / "told"
    before = mark.exists() and mark.read_text() == digest
    mark.write_text(digest)
    return before


def _of_agent(variables: Mapping[str, str]) -> Path | None:
    """The folder above `attempt_0/LOCAL_RANK/error.json`; None where no torchrun has made one."""
    file = Path(variables.get("TORCHELASTIC_ERROR_FILE", ""))
    return file.parents[2] if len(file.parts) > 3 and file.parts[-3].startswith("attempt_") else None


def stale_store(variables: Mapping[str, str]) -> str:
    """What to add where ranks do not find each other's store: torchrun may have given them that of an earlier start."""
    if variables.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or variables.get("GROUP_WORLD_SIZE") == "1":
        return ""
    return (
        f"; if nodes have joined or left since torchrun was started, it may have given ranks the store of an earlier "
        f"start: export {OWN_STORE}=1 before torchrun, on every node"
    )


def which_worlds(sizes: Mapping[str, int]) -> str:
    """How many processes a layout as written can be made of, in words."""
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if -1 in sizes.values():
        return f"{_multiples(fixed)} can form it"
    axis = next((axis for axis in reversed(DATA_AXES) if axis in sizes), "dp_shard")
    rest = fixed // sizes.get(axis, 1)
    return f"{fixed} processes can form it, and with {axis}: -1 {_multiples(rest)} can"


def _multiples(of: int) -> str:
    return "any number" if of == 1 else f"{of}, {2 * of}, {3 * of}, ... processes"
