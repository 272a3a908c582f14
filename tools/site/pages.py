"""What mkdocs adds to docs/ when it makes the site: links into the repository, the pages of commands and of the API."""

import argparse
import importlib
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from meshtrain.cli.main import COMMANDS

SOURCE = "https://github.com/meshtrain/meshtrain/blob/main/"
API = {
    "A loop of your own": [f"meshtrain.{name}" for name in ("start", "build_mesh", "parallelize", "ContextParallel")],
    "Layouts": ["meshtrain.layout.Layout"],
    "Data": ["meshtrain.data.batch.Batch", "meshtrain.data.order"],
    "Terms of the loss": ["meshtrain.loss"],
    "Mixtures of experts": ["meshtrain.experts"],
    "Attention": ["meshtrain.attention"],
    "Sinks": ["meshtrain.metrics.sinks"],
    "Foresight": ["meshtrain.foresight.prediction"],
}  # fmt: skip


def on_page_markdown(markdown: str, **_: Any) -> str:
    """What lies beside docs/ is not on the site: it is linked in the repository. README is the site's first page."""
    markdown = markdown.replace("](../README.md", "](index.md")
    return re.sub(r"\]\(\.\./([^)]+)\)", rf"]({SOURCE}\1)", markdown)


def on_files(files: Files, config: Any) -> Files:
    for name, text in (("index", home()), ("reference/commands", commands()), ("reference/api", api())):
        files.append(File.generated(config, f"{name}.md", content=text))
    return files


def home() -> str:
    text = (
        (Path(__file__).parents[2] / "README.md").read_text().replace("](docs/README.md)", f"]({SOURCE}docs/README.md)")
    )
    return re.sub(
        r"\]\((?:docs/(?=[^)])|(?!http)(?=[^)]))", lambda match: "](" if "docs/" in match[0] else "](../", text
    )


def commands() -> str:
    parts = ["# Commands\n\nTraining is `python -m meshtrain.train CONFIG [key.path=value ...]`."]
    for name, (module, about, example) in COMMANDS.items():
        parser = argparse.ArgumentParser(prog=f"meshtrain {name}")
        importlib.import_module(module).add_arguments(parser)
        parts.append(f"## meshtrain {name}\n\n{about[0].upper()}{about[1:]}.\n\n```bash\n{example}\n```")
        parts.append(f"```text\n{parser.format_help()}```")
    return "\n\n".join(parts) + "\n"


def api() -> str:
    parts = ["# Python API"]
    for title, names in API.items():
        parts += [f"## {title}", *(f"::: {name}\n    options: {{heading_level: 3}}" for name in names)]
    return "\n\n".join(parts) + "\n"
