"""Which cells the parity tests train: every pair of values of two factors stands together in at
least one cell.

A cell gives each factor a value: the size of each axis, a schedule, a precision, and so on. All
combinations would be hundreds of thousands; most errors need one value or the meeting of two.
`meshtrain.verify.covering` chooses few cells that have every pair, but for the pairs that no run
can have, of which `why_not` gives the reason.
"""

from collections.abc import Mapping
from math import prod

from meshtrain.pipeline.schedule import NAMES, build
from meshtrain.verify.covering import Cell

RANKS = 4  # at most

# The first value of each factor is the plain one. A number begins what an axis is: its size.
AXES: dict[str, tuple[str, ...]] = {
    "pp": ("1", "2"),
    "dp_replicate": ("1", "2"),
    "dp_shard": ("1", "2"),
    "cp": ("1", "2", "2, ring", "2, heads"),
    "tp": ("1", "2", "2, whole sequence"),
}
NO_SCHEDULE = "none"
FACTORS: dict[str, tuple[str, ...]] = {
    **AXES,
    "schedule": (NO_SCHEDULE, *NAMES),
    "model": (
        "llama",
        "qwen3",
        "qwen3_moe",
        "glm4_moe",
        "deepseek_v3",
        "convnet",
        "with terms",
        "lora",
    ),
    "optimizer": ("adamw", "muon", "sgd", "adamw, sharded", "adamw, averaged"),
    "recompute": ("none", "selective", "full"),
    "offload": ("none", "both"),
    "precision": ("float64", "float32", "float8"),
    "verify": ("false", "true"),
}
PLAIN: Cell = {name: values[0] for name, values in FACTORS.items()}
EXPERTS = ("qwen3_moe", "glm4_moe", "deepseek_v3")


def ranks_of(cell: Mapping[str, str]) -> int:
    return prod(size(cell, axis) for axis in AXES)


def size(cell: Mapping[str, str], axis: str) -> int:
    return int(cell.get(axis, "1").partition(",")[0])


def stages_per_rank(schedule: str) -> int:
    return (
        1 if schedule == NO_SCHEDULE else build(schedule, ranks=2, microbatches=2).stages_per_rank
    )


def why_not(cell: Mapping[str, str]) -> str | None:
    """Why no run can have these values, of some of the factors or all; None: it can."""
    model, precision = cell.get("model"), cell.get("precision")
    if ranks_of(cell) > RANKS:
        return f"a cell has at most {RANKS} ranks"
    if (
        "pp" in cell
        and "schedule" in cell
        and (cell["pp"] == "1") != (cell["schedule"] == NO_SCHEDULE)
    ):
        return "a schedule is of stages on several ranks"
    if model == "convnet":
        if size(cell, "tp") > 1:
            return "a convolution has no tp_plan"
        if size(cell, "cp") > 1:
            return "an image is no sequence"
        if size(cell, "pp") * stages_per_rank(cell.get("schedule", NO_SCHEDULE)) > 3:
            return "it has three blocks"
        if precision == "float8":
            return "its products are convolutions"
    if model in EXPERTS and precision == "float32":
        return "rounding may change a choice"
    if cell.get("optimizer") == "muon" and precision == "float32":
        return "Muon makes the small directions of a gradient large, and with them its rounding"
    if model == "lora" and precision == "float8":
        return "8 bits round what adapters are beside"
    if cell.get("optimizer") == "adamw, sharded" and size(cell, "dp_shard") * size(cell, "cp") > 1:
        return "FSDP has sharded the optimizer already"
    return None
