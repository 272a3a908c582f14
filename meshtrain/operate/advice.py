"""What of a run's own config helps against a failure: options with the value that they have now.

The config is that which the run wrote into its folder. Without one the advice is general.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

LEVELS = 8  # folders above a log with its run's config.yaml: logs/slurm-7.0/node_0/ID/attempt_0/3/stderr.log is 7
MOST_TP = 8  # tp stays inside of a host


class Settings:
    """A config as it was written, of which any key may be missing."""

    def __init__(self, sections: Mapping[str, Any] | None) -> None:
        self.known = sections is not None
        self._sections = sections or {}

    def get(self, path: str) -> Any:
        """The value at `section.key`, or None."""
        section, _, key = path.partition(".")
        found = self._sections.get(section)
        return found.get(key) if isinstance(found, Mapping) else None

    def number(self, path: str) -> int | float | None:
        """The number at `section.key`, or None."""
        found = self.get(path)
        return found if isinstance(found, int | float) and not isinstance(found, bool) else None

    def axis(self, name: str) -> int:
        """The size of an axis of the mesh; -1 is what is left of the world."""
        found = self.get(f"layout.{name}")
        return found if isinstance(found, int) else 1


def settings_beside(path: str) -> Settings:
    """The config of the run to which a log belongs: the nearest config.yaml above it that is one of meshtrain's."""
    here = Path(path).resolve()
    for folder in ([here] if here.is_dir() else []) + list(here.parents)[:LEVELS]:
        try:
            found = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError):
            continue
        if isinstance(found, dict) and {"model", "batch", "train"} <= set(found):
            return Settings(found)
    return Settings(None)


def advice(name: str | None, settings: Settings) -> list[str]:
    """Options that help, best first: each an override with a word on it, or a sentence."""
    return [] if name is None else OPTIONS[name](settings)


def _memory(settings: Settings) -> list[str]:
    options = _micro_size(settings)
    recompute = settings.get("parallel.recompute")
    if recompute != "full":
        options.append(f"parallel.recompute=full{_now(recompute)}")
    if settings.get("parallel.reshard_after_forward") is False:
        options.append("parallel.reshard_after_forward=true (now false)")
    return [
        *options,
        *_shards(settings),
        *_tensor_parallel(settings),
        *(["train.precision=bfloat16 (now float32)"] if settings.get("train.precision") == "float32" else []),
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment, where much is reserved and not allocated",
    ]


def _micro_size(settings: Settings) -> list[str]:
    size = settings.number("batch.micro_size")
    if size is None:
        return ["a smaller batch.micro_size (the step and its loss stay the same)"]
    if size <= 1:
        return []
    return [f"batch.micro_size={int(size) // 2} (now {size}; the step and its loss stay the same)"]


def _shards(settings: Settings) -> list[str]:
    """More ranks that share parameters, gradients and optimizer state."""
    copies, shards = settings.axis("dp_replicate"), settings.axis("dp_shard")
    if not settings.known:
        return ["a larger layout.dp_shard"]
    if copies == -1:
        return ["layout.dp_replicate=1 layout.dp_shard=-1 (now copies, which each hold everything)"]
    if copies > 1:
        all_of_them = -1 if shards == -1 else copies * shards
        return [f"layout.dp_replicate=1 layout.dp_shard={all_of_them} (now {copies} copies of {_size(shards)} shards)"]
    if shards == -1:
        return ["more processes: layout.dp_shard is -1 and takes them all"]
    return [f"layout.dp_shard={2 * shards} with twice the processes (now {shards})"]


def _tensor_parallel(settings: Settings) -> list[str]:
    now, shards = settings.axis("tp"), settings.axis("dp_shard")
    if not settings.known:
        return ["a larger layout.tp, which splits activations, too"]
    options = []
    if now > 1 and settings.get("parallel.sequence_parallel") is False:
        options.append("parallel.sequence_parallel=true (now false)")
    heads = settings.number("model.num_attention_heads")
    wanted = 2 * now
    if now < 1 or wanted > MOST_TP or heads is None or heads % wanted:
        return options
    if shards > 1 and shards % 2 == 0:
        return [*options, f"layout.tp={wanted} layout.dp_shard={shards // 2} (now {now} and {shards})"]
    left = "" if shards == -1 else " with twice the processes"
    return [*options, f"layout.tp={wanted}{left} (now {now}; splits activations, too)"]


def _host_memory(settings: Settings) -> list[str]:
    options = _workers(settings)
    if settings.get("checkpoint.in_background") is not False:
        options.append(
            f"checkpoint.in_background=false, as a save keeps a copy{_now(settings.get('checkpoint.in_background'))}"
        )
    return options


def _workers(settings: Settings) -> list[str]:
    workers, prefetch = settings.number("data.workers"), settings.number("data.prefetch")
    options = [] if workers == 0 else [f"data.workers=0, or fewer{_now(workers)}"]
    return options if prefetch == 1 or workers == 0 else [*options, f"data.prefetch=1{_now(prefetch)}"]


def _disk(settings: Settings) -> list[str]:
    return [
        f"train.output=FOLDER elsewhere{_now(settings.get('train.output'))}",
        f"checkpoint.path=FOLDER elsewhere{_now(settings.get('checkpoint.path'))}",
        f"checkpoint.keep_last=1{_now(settings.number('checkpoint.keep_last'))}",
        f"data.cache=FOLDER elsewhere{_now(settings.get('data.cache'))}",
    ]


def _nonfinite(settings: Settings) -> list[str]:
    rate, warmup = settings.number("optimizer.lr"), settings.number("optimizer.warmup_steps")
    options = ["a lower optimizer.lr" if rate is None else f"optimizer.lr={rate / 2:g} (now {rate:g})"]
    options.append(
        "a longer optimizer.warmup_steps"
        if warmup is None
        else f"optimizer.warmup_steps={max(2 * int(warmup), 100)} (now {warmup})"
    )
    if settings.known and settings.get("optimizer.clip_norm") is None:
        options.append("optimizer.clip_norm=1.0 (now null)")
    if settings.get("train.precision") == "float16":
        options.append("train.precision=bfloat16 (now float16)")
    if settings.get("train.on_nonfinite") != "skip":
        options.append(f"train.on_nonfinite=skip leaves such steps out{_now(settings.get('train.on_nonfinite'))}")
    return options


def _timeout(settings: Settings) -> list[str]:
    now = settings.number("train.step_timeout_s")
    longer = "train.step_timeout_s=SECONDS" if now is None else f"train.step_timeout_s={2 * now:g} (now {now:g})"
    return [f"{longer}, only if the steps are that slow"]


def _start_timeout(settings: Settings) -> list[str]:
    now = settings.number("train.start_timeout_s")
    return [f"train.start_timeout_s={1800 if now is None else 2 * now:g}{_now(now)}, only if the start is that slow"]


def _time_limit(settings: Settings) -> list[str]:
    return [
        f"train.time_limit=3h50m, or less than the job's limit{_now(settings.get('train.time_limit'))}",
        f"checkpoint.every=STEPS, so that little is lost{_now(settings.get('checkpoint.every'))}",
    ]


def _compile(settings: Settings) -> list[str]:
    now = settings.get("parallel.compile")
    return [] if now is False else [f"parallel.compile=false{_now(now)}"]


def _pipeline(settings: Settings) -> list[str]:
    stages = settings.axis("pp")
    fewer = [f"layout.pp={stages // 2} (now {stages})"] if stages > 1 and stages % 2 == 0 else []
    return [*_micro_size(settings), *fewer]


def _now(value: Any) -> str:
    return "" if value is None else f" (now {str(value).lower() if isinstance(value, bool) else value})"


def _size(size: int) -> str:
    return "all other" if size == -1 else str(size)


OPTIONS: dict[str, Callable[[Settings], list[str]]] = {
    "memory": _memory,
    "host_memory": _host_memory,
    "workers": _workers,
    "disk": _disk,
    "nonfinite": _nonfinite,
    "timeout": _timeout,
    "start_timeout": _start_timeout,
    "time_limit": _time_limit,
    "compile": _compile,
    "pipeline": _pipeline,
}
