"""A verification from its first run to its last: one process, then each layout, and where one
differs, the further runs by which its kind is judged."""

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from meshtrain.config import Config, ConfigErrors, spec_of
from meshtrain.config.checks import OF_TOKENS
from meshtrain.config.schema import OF_TEXT, DataSection
from meshtrain.errors import InputError, yaml_text
from meshtrain.job.watchdog.records import FAILURE_MARK
from meshtrain.layout import Layout, LayoutError
from meshtrain.modeling.build import parameter_count
from meshtrain.script.settings import OUTPUT, PRECISION, STEPS, VARIABLE, read_layout
from meshtrain.verify.compare import (
    TOLERANCE,
    WEIGHT,
    Difference,
    RankStep,
    Tolerances,
    first_difference,
    relative,
)
from meshtrain.verify.kinds import FAILURE, METRIC, ROUNDING, Evidence, Finding, judge
from meshtrain.verify.ranks import CANNOT_RECORD, Ended, Ranks, Work, read_rows
from meshtrain.verify.recording import CONTRIBUTIONS, Tensors, file_of, read_steps, read_tensors
from meshtrain.verify.small import (
    GLOBAL_SIZE,
    HEAD_DIM,
    HEAD_DIM_OF_8_BITS,
    MICRO_SIZE,
    MOST_PARAMETERS,
    SEQ_LEN,
    small_batch,
    small_model,
    small_sequence,
)

Sizes = Mapping[str, int]  # axis -> ranks
Say = Callable[[str], None]

# Beside that of numbers: sums of many small terms, and weights, which the updates of all steps
# before have moved apart.
OF_TENSORS = 10
# How many times the rounding of one process in 16 bits counts as no difference.
OF_16_BITS = 4
JUDGED_IN = "float64"  # in which nothing hides behind rounding
# There, a larger difference is no rounding. A smaller one is, if it grows with the rounding, which
# in float32 is 5e8 times as large; no difference is much larger than 1.
MOST_ROUNDING = 1e-6
GROWS_IN_FLOAT32 = 1e4
EQUAL, DIFFERENT, REFUSED = "equal", "different", "refused"


@dataclass(frozen=True)
class Subject:
    """What is verified.

    Attributes:
        target: a YAML file or the name of one of meshtrain's own, or a script.
        overrides: of the config, or arguments of the script.
        model: overrides of the small copy: `num_hidden_layers=3`.
        precision: of the runs.
    """

    target: str
    overrides: Sequence[str]
    model: Sequence[str]
    steps: int
    precision: str

    @property
    def is_script(self) -> bool:
        return self.target.endswith(".py")


@dataclass(frozen=True)
class Outcome:
    """What became of a layout.

    Attributes:
        reason: a sentence: what differs, or why it was refused.
        difference: relative; infinite where there is nothing to compare.
        apart: for each step, the relative difference of the loss, and of the norm.
    """

    layout: Sizes
    status: str
    reason: str | None = None
    step: int | None = None
    parameter: str | None = None
    difference: float | None = None
    kind: str | None = None
    apart: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True)
class Recorded:
    """A run that has ended, and what it has recorded."""

    folder: Path
    rows: Sequence[Mapping[str, Any]]
    steps: Sequence[Sequence[RankStep]]
    ended: Ended

    @classmethod
    def of(cls, folder: Path, world: int, ended: Ended) -> "Recorded":
        """Raises InputError: something could not be written, so the recording says nothing."""
        for rank in ended.failed:
            if rank.status == CANNOT_RECORD:
                raise InputError(
                    f"what the runs record cannot be written ({rank.last_line}): make room there, "
                    "or let --folder name another place"
                )
        return cls(folder, read_rows(folder), read_steps(folder, world), ended)


@dataclass
class Verification:
    """Verifies layouts of a subject, one after the other. `keeps`: whether what runs have recorded
    stays in the folder."""

    subject: Subject
    ranks: Ranks
    folder: Path
    layouts: Sequence[Sizes]
    say: Say = lambda _: None
    keeps: bool = False
    small: list[str] = field(default_factory=list)  # overrides of the small copy
    _alone: dict[str, Recorded] = field(default_factory=dict)
    _runs: int = 0

    def begin(self) -> None:
        """Makes the small copy, and trains it in one process. Raises InputError: one process does
        not train it."""
        if not self.subject.is_script:
            given = [f"model.{override}" for override in self.subject.model]
            self.small = [*self._small_copy(), *given]
        self.alone(self.subject.precision)

    def verify(self, sizes: Sizes) -> Outcome:
        """Trains a layout and compares it with one process."""
        layout = _layout(sizes)
        refusal = self._refusal(sizes, layout)
        if refusal is not None:
            return Outcome(sizes, REFUSED, refusal)
        try:
            recorded = self._spread(layout, self.subject.precision)
            refusal = recorded.ended.refusal
            if refusal is not None:
                return Outcome(sizes, REFUSED, refusal)
            return self._judged(sizes, layout, recorded, self.subject.precision)
        finally:
            if not self.keeps:
                self._remove_runs()

    def _remove_runs(self) -> None:
        """Removes all that was recorded, but of one process: layouts are compared with it."""
        kept = {recorded.folder for recorded in self._alone.values()}
        for folder in self.folder.iterdir():
            if folder not in kept:
                shutil.rmtree(folder, ignore_errors=True)

    def reference(self) -> dict[str, Any]:
        """What the layouts are compared with, for a report."""
        subject = self.subject
        alone = self.alone(subject.precision)
        tolerances = self.tolerances(subject.precision)
        last = alone.rows[-1] if alone.rows else {}
        return {
            "target": subject.target,
            "overrides": list(subject.overrides),
            "small": self.small,
            "precision": subject.precision,
            "steps": len(alone.rows),
            "loss": last.get("loss"),
            "grad_norm": last.get("grad_norm"),
            "tolerance": tolerances.number,
        }

    # Runs -----------------------------------------------------------------------------------------

    def alone(self, precision: str, *, drops: bool = True) -> Recorded:
        """One process, in a precision; once."""
        key = f"{precision}{'' if drops else ' without dropout'}"
        if key not in self._alone:
            recorded = self._run(None, precision, drops=drops)
            if not recorded.ended.is_done:
                [rank] = recorded.ended.ranks
                text = recorded.ended.refusal or rank.printed.strip() or rank.last_line
                raise InputError(f"one process does not train it, {precision}:\n{text}")
            if not recorded.rows:
                raise InputError(
                    f"one process makes no step of {self.subject.target}, so there is nothing to "
                    "compare: a script has to train by meshtrain.Run (docs/own-loop.md)"
                )
            self._alone[key] = recorded
        return self._alone[key]

    def _spread(self, layout: Layout, precision: str, *, drops: bool = True) -> Recorded:
        alone = self.alone(precision, drops=drops)
        return self._run(
            layout,
            precision,
            drops=drops,
            reference=alone.folder,
            tolerances=self.tolerances(precision),
        )

    def _run(
        self,
        layout: Layout | None,
        precision: str,
        *,
        drops: bool = True,
        reference: Path | None = None,
        tolerances: Tolerances | None = None,
        contributions: int | None = None,
        more: Sequence[str] = (),
    ) -> Recorded:
        """Makes a run in a folder of its own.

        Args:
            layout: None: one process.
            reference, tolerances, contributions, drops: those of `ranks.Work`.
            more: overrides of this run alone.
        """
        self._runs += 1
        folder = self.folder / f"{self._runs:03}"
        folder.mkdir(parents=True)
        output = str(folder / "run")
        world = 1 if layout is None else layout.world_size
        sizes = {"dp_shard": 1} if layout is None else layout.sizes
        subject = self.subject
        variables: dict[str, str] = {}
        if subject.is_script:
            arguments = [subject.target, *subject.overrides]
            variables = {
                VARIABLE: yaml_text(sizes),
                OUTPUT: output,
                PRECISION: precision,
                STEPS: str(subject.steps),
            }
        else:
            place = IN_ONE_PROCESS if layout is None else [f"layout={yaml_text(sizes)}"]
            own = [*self._overrides(precision), f"train.output={output}", *place, *more]
            arguments = [subject.target, *own]
        work = Work(
            arguments=arguments,
            is_script=subject.is_script,
            variables=variables,
            world=world,
            folder=str(folder),
            reference=None if reference is None else str(reference),
            # as JSON has them, by which a job's ranks learn of the run
            tolerances=None if tolerances is None else astuple(tolerances),
            contributions=contributions,
            drops=drops,
        )
        return Recorded.of(folder, world, self.ranks.run(work))

    def tolerances(self, precision: str) -> Tolerances:
        """The largest differences that count as none. In 16 bits as large as those of one process
        from itself in float32."""
        if precision in TOLERANCE:
            number = TOLERANCE[precision]
            return Tolerances(number, OF_TENSORS * number, OF_TENSORS * number)
        exact, rounded = self.alone("float32"), self.alone(precision)
        key = f"{precision} beside float32"
        if key not in self._alone:
            endless = Tolerances(math.inf, math.inf, math.inf)
            self._alone[key] = self._run(
                None, precision, reference=exact.folder, tolerances=endless
            )
        numbers: list[float] = []
        for of_loss, of_norm in _apart(rounded.rows, exact.rows):
            numbers += [of_loss, of_norm]
        gradients: list[float] = []
        weights: list[float] = []
        for (rank,) in self._alone[key].steps:
            gradients += (rank.gradients or {}).values()
            weights += (rank.weights or {}).values()
        return Tolerances(
            number=OF_16_BITS * max(numbers),
            gradient=OF_16_BITS * max(gradients, default=0.0),
            weight=OF_16_BITS * max(weights, default=0.0),
        )

    # Configs --------------------------------------------------------------------------------------

    def _overrides(self, precision: str) -> list[str]:
        """Of every run but its layout and folder."""
        subject = self.subject
        return [
            *subject.overrides,
            *self.small,
            f"train.precision={precision}",
            f"train.steps={subject.steps}",
            *WITHOUT,
        ]

    def _small_copy(self) -> list[str]:
        """Overrides that make a large model, its samples and its batches small."""
        subject = self.subject
        alone = [*self._overrides(subject.precision), *IN_ONE_PROCESS]
        config = Config.load(subject.target, alone, world_size=1)
        overrides: list[str] = []
        notes: list[str] = []

        def change(key: str, value: Any, before: Any) -> None:
            overrides.append(f"{key}={json.dumps(value)}")  # JSON is YAML
            if value != before:
                notes.append(f"{key} {yaml_text(value)} (of {yaml_text(before)})")

        sizes, micro_size = config.batch.sizes, config.batch.micro_size
        if len(sizes.changes) == 1 and sizes.largest > GLOBAL_SIZE:
            few_samples = small_batch(sizes.largest, self.layouts)
            change("batch.global_size", few_samples, sizes.largest)
            is_whole_step = micro_size == sizes.largest
            few = few_samples if is_whole_step else min(MICRO_SIZE, micro_size)
            if few < micro_size:
                change("batch.micro_size", few, micro_size)
        if config.optimizer.warmup_steps > subject.steps // 4:
            change("optimizer.warmup_steps", subject.steps // 4, config.optimizer.warmup_steps)
        is_large = parameter_count(spec_of(config).meta) > MOST_PARAMETERS
        if is_large and config.train.reference is None:
            self._make_model_small(config, change)
        if notes:
            self.say(f"a small copy: {', '.join(notes)}")
        return overrides

    def _make_text_small(self, data: DataSection, change: Callable[[str, Any, Any], None]) -> None:
        if data.source in OF_TEXT and data.tokenizer != "bytes":
            change("data.tokenizer", "bytes", data.tokenizer)
            change("data.begin_token", None, data.begin_token)
            change("data.end_token", None, data.end_token)
        if data.source in OF_TOKENS and data.seq_len > SEQ_LEN:
            length = small_sequence(data.seq_len, self.layouts)
            change("data.seq_len", length, data.seq_len)
            change("data.seq_len_warmup", [], list(data.seq_len_warmup))

    def _make_model_small(self, config: Config, change: Callable[[str, Any, Any], None]) -> None:
        section = config.model
        keys = dict(section.keys)
        of_class = getattr(spec_of(config).module, "hugging_face_config", None)
        if of_class is not None:  # of transformers: its class has the sizes
            keys = of_class(keys["model_type"], keys["config"]).to_dict()
        stages, expert_ranks = self._most_stages_and_expert_ranks()
        changed = small_model(
            keys,
            layouts=self.layouts,
            stages=stages,
            experts=expert_ranks,
            head_dim=HEAD_DIM_OF_8_BITS if config.train.linear_precision else HEAD_DIM,
        )
        # The tokens of prepared data are words of their own vocabulary.
        if config.data.source not in OF_TEXT:
            changed.pop("vocab_size", None)
        self._make_text_small(config.data, change)

        # What gave the other keys would give these too.
        if section.weights is not None or section.preset is not None:
            change("model.weights", None, section.weights)
            change("model.preset", None, section.preset)
        if of_class is not None:
            change("model.path", None, section.keys["path"])
            vocabulary = changed.pop("vocab_size", keys["vocab_size"])
            of_json = {**section.keys["config"], **changed}
            changed = {"model_type": section.keys["model_type"], "config": of_json}
            changed["vocab_size"] = vocabulary
        for name, value in {**section.keys, **changed}.items():
            if value != section.keys[name] or section.weights or section.preset:
                change(f"model.{name}", value, section.keys[name])

    def _most_stages_and_expert_ranks(self) -> tuple[int, int]:
        """Of any of the layouts: the stages of its pipeline, and the ranks over which experts are
        dealt out. Their settings are those of the command, which one process goes without."""
        most_stages, most_expert_ranks = 1, 1
        for sizes in self.layouts:
            own = [*self._overrides(self.subject.precision), f"layout={yaml_text(dict(sizes))}"]
            stages_per_rank, expert_ranks = None, None
            with suppress(InputError, LayoutError):  # it will be refused
                config = Config.load(self.subject.target, own)
                stages_per_rank = config.pipeline.stages_per_rank
                expert_ranks = config.parallel.expert_parallel
            # Some schedules have two stages on each rank.
            most_stages = max(most_stages, sizes.get("pp", 1) * (stages_per_rank or 2))
            most_expert_ranks = max(most_expert_ranks, expert_ranks or sizes.get("tp", 1))
        return most_stages, most_expert_ranks

    def _refusal(self, sizes: Sizes, layout: Layout) -> str | None:
        """Why a layout is refused before anything is started; None: it is not."""
        most = self.ranks.most
        if most is not None and layout.world_size > most:
            return f"the layout has {layout.world_size} ranks, and the job has {most}"
        if self.subject.is_script:
            return None
        own = f"layout={yaml_text(dict(sizes))}"
        overrides = [*self._overrides(self.subject.precision), own]
        try:
            Config.load(
                self.subject.target, overrides, world_size=layout.world_size, for_training=True
            )
        except ConfigErrors as error:
            refusal = "; ".join(each.message for each in error.errors)
        except (InputError, LayoutError) as error:
            refusal = str(error)
        else:
            return None
        if self.small and self._fits_whole(layout, own):
            refusal = f"the small copy (--model gives it other sizes): {refusal}"
        return refusal

    def _fits_whole(self, layout: Layout, own: str) -> bool:
        """Whether the model as it is takes the layout."""
        try:
            Config.load(
                self.subject.target,
                [*self.subject.overrides, own],
                world_size=layout.world_size,
            )
        except (InputError, LayoutError):
            return False
        return True

    # Judging --------------------------------------------------------------------------------------

    def _judged(self, sizes: Sizes, layout: Layout, recorded: Recorded, precision: str) -> Outcome:
        alone = self.alone(precision)
        apart = _apart(recorded.rows, alone.rows)
        differences = self._differences(recorded, precision)
        if not differences and recorded.ended.is_done:
            return Outcome(sizes, EQUAL, apart=apart)
        # A run that has failed lacks steps; what differed before it failed says more.
        if not differences or differences[0].what == "step":
            steps = len(recorded.rows)
            expected = len(alone.rows)
            if recorded.ended.is_done:
                kind = METRIC
                reason = f"it makes {steps} steps in the place of {expected}"
            else:
                kind = FAILURE
                reason = _failure(recorded.ended)
            step = min(steps, expected) + 1
            return Outcome(sizes, DIFFERENT, reason, step=step, kind=kind, apart=apart)
        finding = self._finding(layout, recorded, differences, precision)
        return _different(sizes, finding, differences, apart)

    def _finding(
        self,
        layout: Layout,
        recorded: Recorded,
        differences: Sequence[Difference],
        precision: str,
    ) -> Finding:
        """Of what kind differences are: by the same run in another precision whether they are
        rounding, else by what is recorded in float64."""
        if precision == JUDGED_IN:
            if self._is_rounding(layout, differences):
                return Finding(ROUNDING, "in float32 it is as much larger as rounding is")
            return judge(self._evidence(layout, recorded, differences, precision))

        if self._trains_alone(JUDGED_IN):
            exact_run = self._spread(layout, JUDGED_IN)
            exact = self._differences(exact_run, JUDGED_IN)
            if not exact and exact_run.ended.is_done:
                return Finding(ROUNDING, f"in {JUDGED_IN} the layout is equal")
            if exact and exact[0].what != "step":
                return judge(self._evidence(layout, exact_run, exact, JUDGED_IN))
        return judge(self._evidence(layout, recorded, differences, precision))

    def _trains_alone(self, precision: str) -> bool:
        """Whether one process trains it in another precision than that of the command."""
        try:
            self.alone(precision)
        except InputError:
            return False
        return True

    def _differences(
        self, recorded: Recorded, precision: str, *, drops: bool = True
    ) -> list[Difference]:
        alone = self.alone(precision, drops=drops)
        return first_difference(
            recorded.rows, recorded.steps, alone.rows, alone.steps, self.tolerances(precision)
        )

    def _is_rounding(self, layout: Layout, differences: Sequence[Difference]) -> bool:
        """Whether differences in float64 are the rounding of sums in another order: small, and in
        float32 by orders larger."""
        sizes = [difference.size for difference in differences]
        if not all(size < MOST_ROUNDING for size in sizes) or not self._trains_alone("float32"):
            return False
        recorded = self._spread(layout, "float32")
        alone = self.alone("float32")
        exact = Tolerances(0.0, 0.0, 0.0)
        # In the same step: rounding grows from one to the next.
        step = differences[0].step
        in_32_bits = first_difference(
            recorded.rows, recorded.steps, alone.rows, alone.steps, exact, since=step
        )
        larger = [difference.size for difference in in_32_bits if math.isfinite(difference.size)]
        return max(larger, default=0.0) > GROWS_IN_FLOAT32 * max(sizes)

    def _evidence(
        self,
        layout: Layout,
        recorded: Recorded,
        differences: Sequence[Difference],
        precision: str,
    ) -> Evidence:
        alone = self.alone(precision)
        step = differences[0].step
        own = [_tensors(recorded.folder, rank, step) for rank in range(layout.world_size)]
        return Evidence(
            layout=layout,
            step=step,
            differences=differences,
            expected=_of_step(alone.steps, step),
            ranks=_of_step(recorded.steps, step),
            numbers=_row(recorded.rows, step),
            expected_numbers=_row(alone.rows, step),
            whole=_whole(alone.folder, step),
            own=own,
            contributions=partial(self._contributions, step, precision),
            equal_without_dropout=partial(self._equal_without_dropout, layout, precision),
        )

    def _contributions(self, step: int, precision: str) -> dict[str, Tensor] | None:
        """What each sample adds to each gradient of a step."""
        if self.subject.is_script:
            return None  # its microbatches are its own
        recorded = self._run(None, precision, contributions=step, more=["batch.micro_size=1"])
        file = recorded.folder / CONTRIBUTIONS
        return load_file(file) if file.exists() else None

    def _equal_without_dropout(self, layout: Layout, precision: str) -> bool | None:
        with_dropout = self.alone(precision)
        without = self.alone(precision, drops=False)
        if without.rows[0]["loss"] == with_dropout.rows[0]["loss"]:
            return None  # nothing is dropped
        recorded = self._spread(layout, precision, drops=False)
        return recorded.ended.is_done and not self._differences(recorded, precision, drops=False)


# The layout of one process, and what a config says of axes that it does not have.
IN_ONE_PROCESS = (
    "layout={dp_shard: 1}",
    "parallel.expert_parallel=null",
    "parallel.context_heads=1",
    "parallel.shard_optimizer=false",
    "pipeline.stages_per_rank=null",
    "pipeline.split=null",
)
# What a run of a few steps, which is looked at from inside, does without.
WITHOUT = (
    "train.epochs=null",
    "train.eval_every=0",
    "train.sample_tokens=0",
    "train.export=null",
    "train.on_exit=null",
    "train.time_limit=null",
    "train.chaos=[]",
    "data.workers=0",
    "checkpoint.every=0",
    "checkpoint.resume=none",
    "checkpoint.path=null",
    "checkpoint.local=null",
    "checkpoint.upload=null",
    "checkpoint.keep_best=false",
    "metrics.sinks=[]",
    "metrics.profile=null",
    "metrics.timeline=null",
)


def _layout(sizes: Sizes) -> Layout:
    return Layout({axis: size for axis, size in sizes.items() if size > 1} or {"dp_shard": 1})


def read_layouts(given: Sequence[str]) -> Sequence[Sizes]:
    """Layouts of the command line. Raises InputError: one is none."""
    layouts: list[Sizes] = []
    for text in given:
        sizes = read_layout(text, "--layouts")
        try:
            Layout(sizes)
        except LayoutError as error:
            raise InputError(f"--layouts {text}: {error}") from error
        layouts.append(dict(sizes))
    return layouts


def _row(rows: Sequence[Mapping[str, Any]], step: int) -> Mapping[str, Any]:
    return next((row for row in rows if row["step"] == step), {})


def _of_step(steps: Sequence[Sequence[RankStep]], step: int) -> Sequence[RankStep]:
    """What ranks have recorded of a step; nothing, if they have not come so far."""
    return steps[step] if step < len(steps) else []


def _apart(
    rows: Sequence[Mapping[str, Any]], expected: Sequence[Mapping[str, Any]]
) -> list[tuple[float, float]]:
    """For each step, the relative difference of the loss, and of the norm."""
    apart = []
    for row, other in zip(rows, expected, strict=False):
        of_loss = relative(row["loss"], other["loss"])
        of_norm = relative(row["grad_norm"], other["grad_norm"])
        apart.append((of_loss, of_norm))
    return apart


def _failure(ended: Ended) -> str:
    """What the first rank that has failed says of it; before others, what meshtrain has found out
    itself."""
    said = [headline for rank in ended.failed if (headline := _headline(rank.printed))]
    said += [rank.last_line for rank in ended.failed]
    return f"it fails where one process does not: {said[0]}"


def _headline(printed: str) -> str | None:
    """The sentence in the line for machines of a rank that has failed; None: there is no such
    line."""
    for line in printed.splitlines():
        if line.startswith(FAILURE_MARK):
            with suppress(ValueError):
                text = json.loads(line.removeprefix(FAILURE_MARK))["text"]
                return " ".join(text.split())
    return None


def _different(
    sizes: Sizes,
    finding: Finding,
    differences: Sequence[Difference],
    apart: Sequence[tuple[float, float]],
) -> Outcome:
    parameters = [x.parameter for x in differences if x.parameter is not None]
    parameter = finding.parameter or (parameters[0] if parameters else None)
    # How far that parameter is apart; else, what else differs by a number.
    of_parameter = [x.size for x in differences if parameter and x.parameter == parameter]
    of_numbers = [x.size for x in differences if math.isfinite(x.size)]
    size, *_ = [*of_parameter, *of_numbers, math.inf]
    return Outcome(
        sizes,
        DIFFERENT,
        finding.reason,
        step=differences[0].step,
        parameter=parameter,
        difference=size,
        kind=finding.kind,
        apart=apart,
    )


def _tensors(folder: Path, rank: int, step: int) -> Tensors:
    return dict(read_tensors(file_of(folder, rank, step)))


def _whole(folder: Path, step: int) -> dict[str, Tensor]:
    """The tensors of one process in a step, and the weights before it."""
    whole = {name: held.value for name, held in read_tensors(file_of(folder, 0, step))}
    if step > 0:
        for name, held in read_tensors(file_of(folder, 0, step - 1)):
            kind, _, parameter = name.partition("/")
            if kind == WEIGHT:
                whole[f"before/{parameter}"] = held.value
    return whole
