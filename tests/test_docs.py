"""Every command in README, CONTRIBUTING and docs is run here, shortened, or stands in
documents.yaml with its reason.

A command is a line of a block that is marked `bash`. The commands of one document run one after the
other in one folder, in which the repository's files can be seen and the document's own files have
been written: a block belongs to a file when the paragraph before it ends with: With this `NAME`.
"""

import difflib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from meshtrain.cli import main as cli
from meshtrain.config import Config
from meshtrain.config.errors import ConfigErrors
from meshtrain.experts import Balance, Experts, Router
from meshtrain.layout import Layout
from meshtrain.parallel.sharding import chunk_range
from tests.documents import BLOCK, REPO, blocks
from tests.launching import forked, free_port, run_together

ROOT_DOCUMENTS = [REPO / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md")]
DOCUMENTS = [*ROOT_DOCUMENTS, *sorted((REPO / "docs").rglob("*.md"))]
# of the repository, in the folder where commands run
SEEN = (
    "README.md",
    "configs",
    "docs",
    "models",
    "tools",
)
TABLES: dict[str, Any] = yaml.safe_load((REPO / "tests" / "documents.yaml").read_text())
NOT_RUN = {command for commands in TABLES["not_run"].values() for command in commands}
IN_CI = set(TABLES["in_ci"])

# tools/examples: a script for one device, and the same on any mesh
SCRIPTS = ("plain.py", "spread.py")

STANDALONE = re.compile(r"^torchrun --standalone --nproc-per-node=(\d+) ")
TWO_HOSTS = re.compile(r"^torchrun --nnodes=2 --nproc-per-node=(\d+) (?:--rdzv-\S+ )+")


def commands(document: Path) -> list[str]:
    """What stands there twice is run once."""
    return list(
        dict.fromkeys(command for block in blocks(document) for command in block.commands())
    )


COMMANDS = {command for document in DOCUMENTS for command in commands(document)}


def is_setup(command: str) -> bool:
    """Whether a command sets up or tests: `.ci/run` and the Makefile have it, and a test below
    compares."""
    return command.startswith("make ") or "-m venv" in command or "-m pip" in command


def goes_on(command: str, folder: Path) -> bool:
    """Whether a command trains in the folder of an earlier one."""
    output = re.search(r"train\.output=(\S+)", command)
    return "meshtrain.train" in command and output is not None and (folder / output[1]).exists()


def shortened(command: str, longer: bool) -> list[str]:
    """What is run for a command: itself, shortened if it trains; for two hosts, an agent for each.

    The two hosts are this machine with a free port, and their different numbers of GPUs 2 and 1
    processes.

    Args:
        longer: with 5 steps: the command goes on with the run of an earlier one, or the run is
            measured.
    """
    command = command.replace(
        "--standalone --nproc-per-node=gpu", "--standalone --nproc-per-node=2"
    )
    if "meshtrain.train" in command:
        command = f"{command} {TABLES['short']}" + " train.steps=5" * longer
        # any number of processes does: starting one takes longer than its steps
        if "layout=" not in command:
            command = command.replace("--nproc-per-node=4", "--nproc-per-node=2")
    if "--nnodes=2" not in command:
        return [command]
    here = command.replace("host-a:29500", f"localhost:{free_port()}")
    assert here != command, "a command for two hosts names host-a:29500"
    return [here.replace("--nproc-per-node=gpu", f"--nproc-per-node={n}") for n in (2, 1)]


def forked_job(command: str) -> tuple[int, list[str]] | None:
    """Processes and arguments of what needs neither a shell nor a launcher of its own, and can be
    forked. Two hosts with the same number of processes are one host; agents meet where the numbers
    differ (`shortened`)."""
    for launcher, hosts in ((STANDALONE, 1), (TWO_HOSTS, 2)):
        if processes := launcher.match(command):
            return hosts * int(processes[1]), shlex.split(launcher.sub("", command))
    arguments = shlex.split(command)
    if "--nnodes" in command or {"|", "||", "&&", ">"} & set(arguments):
        return None
    if command.startswith("meshtrain "):
        return 1, ["-m", "meshtrain.cli", *arguments[1:]]
    return (1, arguments[1:]) if command.startswith("python -m ") else None


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "document", list(filter(commands, DOCUMENTS)), ids=lambda document: document.name
)
def test_the_commands_of_a_document_run(document: Path, tmp_path: Path) -> None:
    for name in SEEN:
        (tmp_path / name).symlink_to(REPO / name)
    files = {block.file: block.text for block in blocks(document) if block.file is not None}
    copied = TABLES["copied"].get(document.name, {})
    files |= {name: (REPO / path).read_text() for name, path in copied.items()}
    for name, text in (TABLES["given"].get(document.name, {}) | files).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    environment = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "CUDA_VISIBLE_DEVICES": "",  # any number of processes runs on a CPU
    }
    # the first that trains by torchrun, until it has started a job
    as_shown = document.name == "getting-started.md"
    for command in commands(document):
        if is_setup(command) or command in NOT_RUN:
            continue
        further = goes_on(command, tmp_path)
        longer = further or command.endswith("train.output=runs/seen")
        ended = len(list(tmp_path.glob("runs/*/exit.json")))
        agents = shortened(command, longer)
        plain = None if as_shown or agents[0] != agents[-1] else forked_job(agents[0])
        if plain is not None:
            jobs = [forked(plain[0], *plain[1], cwd=tmp_path)]
        else:
            shells = [("bash", "-c", agent) for agent in agents]
            jobs = run_together(shells, env=environment, cwd=tmp_path, timeout=240)
            as_shown = as_shown and not STANDALONE.match(command)
        for job in jobs:
            assert job.status == 0, f"{document.name}: {command}\n{job.out}\n{job.err}"
        if "meshtrain.train" in command:
            endings = sorted(tmp_path.glob("runs/*/exit.json"), key=os.path.getmtime)
            assert len(endings) == ended + (not further), (
                f"{document.name}: {command} has no folder of its own"
            )
            last = json.loads(endings[-1].read_text())
            assert (last["status"], last["step"]) == ("done", 5 if longer else 3)


def test_what_is_not_run_is_known() -> None:
    assert NOT_RUN <= COMMANDS, "documents.yaml names a command that no document has any more"
    assert [command for command in COMMANDS - NOT_RUN if command.startswith("srun")] == []


def test_no_command_hides_in_a_block_without_a_language() -> None:
    hidden = [
        f"{document.name}: {line}"
        for document in DOCUMENTS
        for block in blocks(document)
        if block.language == ""
        for line in block.text.splitlines()
        if line.split(" ")[0] in TABLES["programs"]
        or (line.startswith("$ ") and line[2:] not in TABLES["with_output"])
    ]
    assert hidden == []


def test_ci_does_what_the_documents_say() -> None:
    """Commands that set up are no test's business: `.ci/run` has them word by word, or the Makefile
    says them."""
    script = (REPO / ".ci" / "run").read_text()
    setup = {command for command in COMMANDS if is_setup(command)}
    assert {
        line.partition("|")[0].partition("2>")[0].strip() for line in script.splitlines()
    } >= IN_CI
    assert setup >= IN_CI
    makefile = dry_run("train")
    for command in setup - IN_CI - NOT_RUN:
        if command.startswith("make train ARGS="):
            overrides = command.partition("ARGS=")[2].strip('"')
            assert f"configs/quickstart.yaml {overrides}\n" in dry_run("train", f"ARGS={overrides}")
        else:
            assert f"{command}\n" in makefile


def dry_run(*arguments: str) -> str:
    """What `make` would do in a fresh clone."""
    assert shutil.which("make"), "make is missing: apt-get install make"
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MAKE", "MFLAGS", "VENV"))
    }
    finished = subprocess.run(
        ["make", "--dry-run", "--no-print-directory", f"--directory={REPO}", *arguments],
        capture_output=True,
        text=True,
        check=True,
        env=environment | {"VENV": "fresh"},
    )
    return finished.stdout.replace("fresh", ".venv")


def test_links_lead_somewhere() -> None:
    broken = []
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)]+)\)", BLOCK.sub("", document.read_text())):
            name, _, anchor = target.partition("#")
            path = document.parent / name if name else document
            if "://" not in target and not (
                path.exists() and (anchor == "" or anchor in anchors(path))
            ):
                broken.append(f"{document.name} links to {target}")
    assert broken == []


def anchors(document: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_blocks_are_of_their_language() -> None:
    for document in DOCUMENTS:
        for block in blocks(document):
            try:
                if block.language == "python":
                    compile(block.text, document.name, "exec")
                elif block.language == "yaml":
                    yaml.safe_load(block.text)
                elif block.language == "json":
                    json.loads(block.text)
            except (SyntaxError, ValueError, yaml.YAMLError) as error:
                raise AssertionError(f"{document.name}: {error}\n{block.text}") from error


def test_the_lists_of_documents_and_configs_are_complete() -> None:
    index = (REPO / "docs" / "README.md").read_text()
    data = (REPO / "docs" / "data.md").read_text()
    # The list of modules is for whoever reads design.md, which links it.
    unlisted = {"README.md", "modules.md"}
    pages = [page.name for page in (REPO / "docs").glob("*.md") if page.name not in unlisted]
    assert [page for page in pages if f"({page})" not in index] == []
    for config in (REPO / "configs").glob("*.yaml"):
        assert f"`{config.name}`" in data
        assert config.read_text().startswith("# "), f"{config.name} says when to use it"


# What stands in single documents ------------------------------------------------------------------


def test_the_first_page_shows_how_plain_becomes_spread() -> None:
    examples = REPO / "tools" / "examples"
    plain, spread = ((examples / name).read_text().splitlines() for name in SCRIPTS)
    whole = difflib.unified_diff(plain, spread, n=0, lineterm="")
    # without the two lines that name the files
    changed = [line for line in list(whole)[2:] if line.startswith(("+", "-"))]
    block = next(block for block in blocks(REPO / "README.md") if block.language == "diff")
    shown = [line for line in block.text.splitlines() if line.startswith(("+", "-"))]
    # an empty line may be shown after its neighbour instead of before it
    assert sorted(shown) == sorted(changed)
    assert [line for line in shown if len(line) > 1] == [line for line in changed if len(line) > 1]
    assert {line[1:] for line in block.text.splitlines() if line.startswith(" ")} <= {
        *spread,
        "...",
    }
    tutorial = blocks(REPO / "docs" / "tutorial.md")
    assert next(block.text for block in tutorial if block.file == "plain.py").splitlines() == plain


@pytest.mark.slow
def test_the_first_page_shows_the_losses_of_its_script(tmp_path: Path) -> None:
    """The text of the script is torch's source, so another version of torch has another loss: what
    is compared is that all are the same."""
    (tmp_path / "tools").symlink_to(REPO / "tools")
    readme = list(blocks(REPO / "README.md"))
    loop = next(
        command for block in readme for command in block.commands() if "spread.py" in command
    )
    environment = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    (job,) = run_together([("bash", "-c", loop)], env=environment, cwd=tmp_path, timeout=240)
    printed = job.out.splitlines()
    shown = next(block.text for block in readme if block.text.startswith("step 20 loss"))
    assert len(printed) == len(shown.splitlines()) == 3
    assert set(printed) == {printed[0]}
    assert len(set(shown.splitlines())) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["tensor-parallel", "context-parallel", "experts", "mesh", "memory"]
)
def test_a_picture_is_what_its_script_draws(name: str, tmp_path: Path) -> None:
    """Fonts and versions of matplotlib move pixels, so sizes are compared, and that something was
    drawn."""
    from PIL import Image

    script = REPO / "tools" / "pictures" / f"{name.replace('-', '_')}.py"
    drawn = tmp_path / "drawn.png"
    forked(1, script, drawn).check()
    with Image.open(drawn) as ours, Image.open(REPO / "docs" / "images" / f"{name}.png") as shown:
        assert ours.size == shown.size
        assert len(ours.convert("RGB").getcolors(2**16) or []) > 8


def table(page: str, name: str) -> list[list[str]]:
    """The cells of the table between the comments `NAME: ...` and `end of NAME`, without its
    head."""
    text = (REPO / "docs" / page).read_text()
    lines = text.split(f"<!-- {name}:")[1].split(f"<!-- end of {name}")[0].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_which_ranks_hold_which_experts() -> None:
    rows = table("experts.md", "fold")
    assert len(rows) == 7
    for sizes, ep, experts, shards, copies in rows:
        layout = Layout(yaml.safe_load(sizes.strip("`"))).with_experts(int(ep))
        parts = [chunk_range(8, int(ep), layout.index(rank, "ep")) for rank in range(4)]
        assert experts == ", ".join(f"{part.start}-{part.stop - 1}" for part in parts), sizes
        assert (shards, copies) == (str(layout.size("efsdp")), str(layout.size("edp_replicate"))), (
            sizes
        )


def test_what_is_refused_of_experts() -> None:
    section = (
        (REPO / "docs" / "experts.md").read_text().split("## What is refused")[1].split("\n## ")[0]
    )
    sentences = re.findall(r"^- `([^`]*)`$", section, re.MULTILINE)
    for sentence, overrides in zip(sentences, TABLES["refused"], strict=True):
        with pytest.raises(ConfigErrors) as refused:
            Config.load(str(REPO / "configs" / "moe.yaml"), overrides)
        assert " ".join(sentence.split()) in str(refused.value)


@pytest.mark.slow
def test_what_a_plan_says_of_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "qwen3.yaml"
    config.write_text(
        "model: {name: qwen3_moe, preset: qwen3-30b-a3b}\ndata: {seq_len: 4096}\nlayout: "
        "{dp_shard: 8}\n"
        "parallel: {expert_parallel: 8}\nbatch: {global_size: 64, micro_size: 1}\n"
        "train: {steps: 1, precision: bfloat16}\n"
    )
    assert cli.main(["plan", str(config)]) == 0
    printed = capsys.readouterr().out
    quoted = next(
        b.text for b in blocks(REPO / "docs" / "experts.md") if "active a token" in b.text
    )
    assert quoted in printed


@pytest.mark.parametrize("narrow", [False, True], ids=["float32", "bfloat16"])
def test_what_a_layer_of_experts_keeps(narrow: bool) -> None:
    n, d, f, e, j = 64, 32, 24, 8, 3
    dtype, itemsize = (torch.bfloat16, 2) if narrow else (torch.float32, 4)
    gate = Router(d, e, j, balance=Balance(e, 1, 0, aux_loss_coef=0.1)).to(dtype)
    experts = Experts(e, d, f).to(dtype)
    x = torch.randn(4, n // 4, d, dtype=dtype, requires_grad=True)
    own = {p.data_ptr() for p in (x, *gate.parameters(), *experts.parameters())}
    storages = {}  # themselves: of one that is freed, the next may have the address

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        experts(x, *gate(x))
    rows = n * j * (d + 4 * f) + n * j * d
    scores = n * e + n * d * narrow
    expected = rows * itemsize + scores * 4 + 3 * n * j * 8
    # What the table leaves out: weights before and after their division, two sums of a token;
    # shares and counts of experts, and the router's weight in float32.
    small = 4 * (2 * n * j + 2 * n) + 12 * e + 4 * e * d * narrow
    assert (
        sum(storage.nbytes() for place, storage in storages.items() if place not in own)
        == expected + small
    )
