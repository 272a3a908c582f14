"""Breaks the product in many small ways, one at a time, and counts how many of them the tests
notice.

    python tools/mutate.py                      60 mutations against the tests of this checkout
    python tools/mutate.py --tests ../before    the same, against the tests of another checkout
    python tools/mutate.py --whole              survivors once more, against all of `make test`
    python tools/mutate.py --list               only prints what it would change

A mutation flips an operator, drops a collective, shifts an index or skips a branch in one of the
rooms below. Which ones is a function of SEED and the text of the product. Each is made in a copy of
the checkout and runs, side by side, the tests of its room and the parity cells on two ranks, until
a test fails, but no longer than LIMIT_S. What no test has failed for until then has survived: some
mutations change nothing that can be seen, so what counts is the difference between two suites.

Results are appended to a file, a JSON object per mutation. Started again, it goes on behind the
last one.
"""

import argparse
import ast
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
SEED = 36
COUNT = 60
LIMIT_S = 120.0
WHOLE_LIMIT_S = 2400.0
MARK = "MESHTRAIN_MUTATION"  # in the environment of every process that a mutation starts

# Room -> its files and its tests.
ROOMS = {
    "layout": (["meshtrain/layout.py"], ["tests/test_layout.py"]),
    "loss": (["meshtrain/loss.py"], ["tests/test_loss.py", "tests/test_training.py"]),
    "parallel": (["meshtrain/parallel"], ["tests/parallel"]),
    "pipeline": (["meshtrain/pipeline"], ["tests/pipeline"]),
    "optim": (["meshtrain/optim"], ["tests/optim"]),
    "data": (["meshtrain/data"], ["tests/data"]),
    "checkpoint": (["meshtrain/checkpoint"], ["tests/checkpoint"]),
}
PARITY = [
    "tests/parity/test_pairs.py",
    "tests/parity/test_parity.py",
    "-k",
    "test_same_curve_as_one_process and 2-ranks",
]

COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
ARITHMETIC = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
COLLECTIVE = re.compile(
    r"all_reduce|all_gather|reduce_scatter|all_to_all|broadcast(?!_to)|start_reduce|finish_reduce|exchange"
)


@dataclass(frozen=True)
class Mutation:
    """One change of one file: the text between two offsets is replaced."""

    room: str
    kind: str
    file: str
    line: int
    start: int
    end: int
    before: str
    after: str

    def __str__(self) -> str:
        return (
            f"{self.file}:{self.line} {self.kind}: {' '.join(self.before.split())} -> {self.after}"
        )


# --------------------------------------------------------------------------------------------------
# what to change


def replacements(node: ast.AST) -> Iterator[tuple[str, ast.expr, str]]:
    """The changes that can be made at one node: (kind, the expression that is replaced, its new
    text)."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARISONS:
            yield (
                "operator",
                node,
                ast.unparse(ast.Compare(left, [COMPARISONS[type(op)]()], [right])),
            )
        case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC and not is_text(
            left, right
        ):
            yield (
                "operator",
                node,
                f"({ast.unparse(ast.BinOp(left, ARITHMETIC[type(op)](), right))})",
            )
        case ast.BoolOp(op=op, values=values):
            other = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield "operator", node, f"({ast.unparse(ast.BoolOp(other, values))})"
        case ast.Subscript(slice=ast.Constant(value=int(index)) as place):
            yield "index", place, str(index + 1)
        case ast.Subscript(slice=ast.Slice(upper=ast.expr() as upper)):
            yield "index", upper, f"({ast.unparse(upper)}) - 1"
        case ast.Call(func=ast.Name(id="range"), args=[*_, ast.expr() as upper]):
            yield "index", upper, f"({ast.unparse(upper)}) - 1"
        case ast.If(test=test) | ast.IfExp(test=test):
            yield "branch", test, "False"
        case ast.Expr(value=ast.Call() as call) if is_collective(call):
            yield "collective", call, "None"
        case ast.Call(func=ast.Attribute(value=ast.Call() as call, attr="wait")) if (
            is_collective(call) and call.args
        ):
            yield "collective", node, ast.unparse(call.args[0])
        case ast.Call(args=[first, *_]) if is_collective(node):
            yield "collective", node, ast.unparse(first)


def is_text(*operands: ast.expr) -> bool:
    """Whether an operand is a text or a list, which have no other operator."""
    return any(
        isinstance(x, ast.JoinedStr | ast.List | ast.Tuple) or ast.unparse(x)[0] in "'\""
        for x in operands
    )


def is_collective(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return COLLECTIVE.search(name) is not None


def running_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run: no annotations, no decorators, and nothing of what only types are
    imported for."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST):
                continue
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            yield child
            yield from running_nodes(child)


def mutations_of(file: Path, room: str) -> Iterator[Mutation]:
    text = file.read_text()
    line_starts = [0]
    for line in text.splitlines(keepends=True):
        line_starts.append(line_starts[-1] + len(line))

    def offset(line: int, column: int) -> int:
        """A column of the syntax tree counts bytes."""
        start = line_starts[line - 1]
        return start + len(text[start : line_starts[line]].encode()[:column].decode())

    for node in running_nodes(ast.parse(text)):
        for kind, replaced, after in replacements(node):
            assert replaced.end_lineno is not None
            assert replaced.end_col_offset is not None
            start = offset(replaced.lineno, replaced.col_offset)
            end = offset(replaced.end_lineno, replaced.end_col_offset)
            name = str(file.relative_to(REPO))
            mutation = Mutation(
                room, kind, name, replaced.lineno, start, end, text[start:end], after
            )
            if compiles(text[:start] + after + text[end:]):
                yield mutation


def compiles(text: str) -> bool:
    try:
        compile(text, "mutated", "exec")
    except SyntaxError:
        return False
    return True


def chosen(count: int, seed: int) -> list[Mutation]:
    """As many of each room, and within a room of each kind that it has; no two of one line."""
    rng = random.Random(seed)
    found: dict[str, dict[str, list[Mutation]]] = {}
    for room, (paths, _) in ROOMS.items():
        found[room] = {}
        for path in paths:
            files = [REPO / path] if path.endswith(".py") else sorted((REPO / path).rglob("*.py"))
            for file in files:
                for mutation in mutations_of(file, room):
                    found[room].setdefault(mutation.kind, []).append(mutation)
    rooms = list(ROOMS)
    picked: dict[tuple[str, int], Mutation] = {}
    while len(picked) < count:
        kinds = found[rooms[len(picked) % len(rooms)]]
        mutation = rng.choice(kinds[rng.choice(sorted(kinds))])
        picked.setdefault((mutation.file, mutation.line), mutation)
    return list(picked.values())


# -------------------------------------------------------------------------------------------------
# whether it is seen


def copy_of(tests: Path, folder: Path, mutation: Mutation | None) -> None:
    """The tests' checkout with this checkout's product, changed at one place."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=tests, check=True, capture_output=True, text=True
    ).stdout
    for name in filter(None, listed.split("\0")):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (tests / name).is_file():
            shutil.copy2(tests / name, target)
    for product in ("meshtrain", "models"):
        shutil.rmtree(folder / product)
        shutil.copytree(
            REPO / product, folder / product, ignore=shutil.ignore_patterns("__pycache__")
        )
    if mutation is not None:
        file = folder / mutation.file
        text = file.read_text()
        assert text[mutation.start : mutation.end] == mutation.before
        file.write_text(text[: mutation.start] + mutation.after + text[mutation.end :])


@dataclass(frozen=True)
class Verdict:
    """What became of a mutation. `by`: the first test that failed; None: none did, and `ended` says
    whether all ran."""

    by: str | None
    ended: bool
    seconds: float


def verdict_of(folder: Path, commands: list[list[str]], limit_s: float) -> Verdict:
    """Runs pytest with each list of arguments, side by side, until one of them sees a test fail."""
    mark = uuid.uuid4().hex
    environment = os.environ | {MARK: mark, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}
    started = time.monotonic()
    runs: list[tuple[subprocess.Popen, Path]] = []
    for i, arguments in enumerate(commands):
        log = folder / f"mutate_{i}.log"
        with log.open("w") as file:
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-x",
                "-q",
                "-rfE",
                "-p",
                "no:cacheprovider",
                *arguments,
            ]
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
            runs.append((process, log))
    try:
        while True:
            statuses = [process.poll() for process, _ in runs]
            seconds = round(time.monotonic() - started, 1)
            for status, (_, log) in zip(statuses, runs, strict=True):
                if status not in (None, 0):
                    return Verdict(first_failure(log.read_text()), True, seconds)
            if None not in statuses:
                return Verdict(None, True, seconds)
            if seconds > limit_s:
                return Verdict(None, False, seconds)
            time.sleep(0.2)
    finally:
        kill_marked(mark)
        for process, _ in runs:
            process.wait()


def first_failure(printed: str) -> str:
    """The test of which pytest's summary says that it failed, or its last line."""
    summary = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", printed, re.MULTILINE)
    return summary[1] if summary else printed.strip().rpartition("\n")[2]


def kill_marked(mark: str) -> None:
    """Ends every process that a run has started, also those that have a session of their own."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                os.kill(int(folder.name), signal.SIGKILL)
        except OSError:  # it has ended meanwhile
            continue


def tried(
    mutation: Mutation | None, tests: Path, commands: list[list[str]], limit_s: float
) -> Verdict:
    with tempfile.TemporaryDirectory(prefix="mutation") as folder:
        copy_of(tests, Path(folder), mutation)
        return verdict_of(Path(folder), commands, limit_s)


# --------------------------------------------------------------------------------------------------
# the command


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument(
        "--tests", type=Path, default=REPO, help="the checkout whose tests run; this one"
    )
    parser.add_argument("--results", type=Path, default=REPO / "build" / "mutations.jsonl")
    parser.add_argument(
        "--parity", default=json.dumps(PARITY), help="pytest's arguments for parity, as JSON"
    )
    parser.add_argument(
        "--whole",
        action="store_true",
        help="survivors of the results against the whole of `make test`",
    )
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    mutations = chosen(options.count, options.seed)
    if options.list:
        print(*mutations, sep="\n")
        return 0
    options.results.parent.mkdir(parents=True, exist_ok=True)
    rows = (
        [json.loads(line) for line in options.results.read_text().splitlines()]
        if options.results.exists()
        else []
    )
    known = {key_of(row) for row in rows}
    if options.whole:
        survivors = [row for row in rows if row["by"] is None and not row["whole"]]
        survived = {key_of(row) for row in survivors}
        todo = [m for m in mutations if key_of(asdict(m) | {"whole": False}) in survived]
    else:
        todo = list(mutations)
    whole = [["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]]
    for i, mutation in enumerate(todo, 1):
        key = key_of(asdict(mutation) | {"whole": options.whole})
        if key in known:
            continue
        commands = whole if options.whole else [ROOMS[mutation.room][1], json.loads(options.parity)]
        limit_s = WHOLE_LIMIT_S if options.whole else LIMIT_S
        verdict = tried(mutation, options.tests, commands, limit_s)
        row = asdict(mutation) | asdict(verdict) | {"whole": options.whole}
        with options.results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        rows.append(row)
        print(
            f"{i}/{len(todo)} {mutation}\n    {verdict.by or 'survived'}, {verdict.seconds:.0f} s",
            flush=True,
        )
    print(summary(rows))
    return 0


def key_of(row: dict) -> tuple:
    return row["file"], row["start"], row["before"], row["after"], row["whole"]


def summary(rows: list[dict]) -> str:
    """Noticed of all, by room and by kind."""
    lines = []
    for whole in (False, True):
        of_phase = [row for row in rows if row["whole"] == whole]
        for field in ("room", "kind"):
            total = Counter(row[field] for row in of_phase)
            noticed = Counter(row[field] for row in of_phase if row["by"] is not None)
            lines.append(", ".join(f"{name} {noticed[name]}/{total[name]}" for name in total))
        noticed_in_all = sum(row["by"] is not None for row in of_phase)
        lines.append(
            f"{'whole suite' if whole else 'room and parity'}: {noticed_in_all} of {len(of_phase)} "
            "noticed"
        )
    return "\n".join(line for line in lines if line)


if __name__ == "__main__":
    sys.exit(main())
