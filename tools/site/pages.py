"""mkdocs hooks that add to docs/ what the site needs: links into the repository, pages of the
commands and the API."""

import argparse
import importlib
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from meshtrain.cli.main import COMMANDS
from meshtrain.run.status import EXIT_RESTART, STOPPED
from meshtrain.train import train_parser

DOCS = Path(__file__).parents[2] / "docs"
SOURCE = "https://github.com/meshtrain/meshtrain/blob/main/"
API = {
    "A loop of your own": [
        f"meshtrain.{name}" for name in ("start", "build_mesh", "parallelize", "ContextParallel")
    ],
    "Layouts": ["meshtrain.layout.Layout"],
    "Data": ["meshtrain.data.batch.Batch", "meshtrain.data.order"],
    "Terms of the loss": ["meshtrain.loss"],
    "Mixtures of experts": ["meshtrain.experts"],
    "Attention": ["meshtrain.attention"],
    "Sinks": ["meshtrain.metrics.sinks"],
    "Foresight": ["meshtrain.foresight.prediction"],
}


EXIT = f"""# Exit statuses

| status | of training, `python -m meshtrain.train` |
| --- | --- |
| 0 | all steps are done; under torchrun also a run that was asked to stop |
| {STOPPED} | asked to stop: everything is saved, and the same command goes on |
| 2 | the input is wrong: a config, data, a layout; nothing was begun |
| {EXIT_RESTART} | a fault, or another node's; torchrun makes {EXIT_RESTART} of every status but 0 |
| other | a fault; 128 + n: ended by signal n |

What happened is in `exit.json` of the run's folder, for scripts ([Metrics](../metrics.md#goodput)).

| status | of the commands, `meshtrain ...` |
| --- | --- |
| 0 | done |
| 1 | `checkpoint verify`, `data verify`, `doctor`, `explain`: something is wrong or has failed |
| 2 | the input is wrong |
"""


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to files outside docs/, which are not on the site, go to the repository. README is the
    site's first page.

    A link whose text is the name of a file gets the title of its page as its text."""
    markdown = re.sub(
        r"\[(?:docs/)?([\w-]+)\.md\](?=\()", lambda match: f"[{title(match[1])}]", markdown
    )
    # From a page's folder to the repository's root: ../ for docs/, ../../ for docs/skills/.
    up = "../" * (page.file.src_uri.count("/") + 1)
    markdown = markdown.replace(f"]({up}README.md", f"]({up[3:]}index.md")
    return re.sub(rf"\]\({re.escape(up)}(?!metrics)([^)]+)\)", rf"]({SOURCE}\1)", markdown)


def title(name: str) -> str:
    """The heading of a page of docs/, or the file's name."""
    path = DOCS / f"{name}.md"
    return (
        path.read_text().partition("\n")[0].removeprefix("# ") if path.is_file() else f"{name}.md"
    )


def on_files(files: Files, config: Any) -> Files:
    pages = {
        "index.md": home(),
        "reference/commands.md": commands(),
        "reference/exit.md": EXIT,
        "reference/api.md": api(),
    }
    pages["assets/site.css"] = (Path(__file__).parent / "site.css").read_text()
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def home() -> str:
    """README, with its links rewritten relative to docs/."""
    text = (DOCS.parent / "README.md").read_text()
    text = text.replace("[docs/](docs/README.md)", "the pages beside this one")
    return re.sub(r"\]\((docs/)?(?!http|#)", lambda match: "](" if match[1] else "](../", text)


def commands() -> str:
    parts = [
        "# Commands",
        "## python -m meshtrain.train",
        f"```text\n{train_parser().format_help()}```",
    ]
    for name, (module, about, example) in COMMANDS.items():
        parser = argparse.ArgumentParser(prog=f"meshtrain {name}")
        importlib.import_module(module).add_arguments(parser)
        parts.append(
            f"## meshtrain {name}\n\n{about[0].upper()}{about[1:]}.\n\n```bash\n{example}\n```"
        )
        parts.append(f"```text\n{parser.format_help()}```")
        for action in parser._actions:  # a command's own commands
            if isinstance(action, argparse._SubParsersAction):
                parts += [
                    f"```text\n{of_action.format_help()}```"
                    for of_action in action.choices.values()
                ]
    return "\n\n".join(parts) + "\n"


def api() -> str:
    parts = ["# Python API"]
    for heading, names in API.items():
        parts += [
            f"## {heading}",
            *(f"::: {name}\n    options: {{heading_level: 3}}" for name in names),
        ]
    return "\n\n".join(parts) + "\n"
