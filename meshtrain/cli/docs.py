"""`meshtrain docs [PAGE]`: the documentation of this version, opened in a browser without a
network."""

import argparse
import difflib
import html
import itertools
import posixpath
import re
import shutil
import webbrowser
from collections.abc import Mapping
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

from meshtrain.data.cache import cache_folder
from meshtrain.errors import InputError, writing
from meshtrain.job import locate

SOURCE = "https://github.com/meshtrain/meshtrain/blob/main/"
FIRST = "index"  # the page of README
CONTENTS = "contents"
# Files whose pages are not called as they are.
NAMES = {
    "README.md": FIRST,
    "CONTRIBUTING.md": "contributing",
    "CHANGELOG.md": "changelog",
    "docs/README.md": CONTENTS,
}
IS_ELSEWHERE = re.compile(r"[a-z]+:|#")  # a link with a scheme, or to a heading of the same page

STYLE = """
:root { color-scheme: light dark }
body { max-width: 50rem; margin: 2rem auto; padding: 0 1rem; font: 1rem/1.6 system-ui, sans-serif }
pre { padding: .8rem; overflow-x: auto; background: #8881; border-radius: 6px; line-height: 1.4 }
code { font-size: .9em }
table { display: block; overflow-x: auto; border-collapse: collapse }
td, th { border: 1px solid #8885; padding: .3rem .6rem; text-align: left; vertical-align: top }
img { max-width: 100%; background: white }
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("page", nargs="?", default=FIRST, help="such as layouts (the first page)")
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="where to write the pages (the user's cache)"
    )


def run(arguments: argparse.Namespace) -> None:
    """Raises InputError: there is no such page, or the pages cannot be written."""
    texts = sources()
    page = arguments.page.removesuffix(".md").removeprefix("docs/")
    if page not in texts:
        near = difflib.get_close_matches(page, texts, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(sorted(texts))}"
        raise InputError(f"the documentation has no page {page!r} ({hint})")

    folder = arguments.folder or cache_folder(None) / "docs"
    with writing(str(folder)):
        write(texts, folder)
    address = (folder / f"{page}.html").resolve().as_uri()
    print(address)
    webbrowser.open(address)  # False where there is none: the address is printed


def sources() -> dict[str, str]:
    """Name of each page -> its Markdown file, from the root of the repository or of what travels in
    a wheel."""
    docs = locate.bundled("docs")
    files = [path.relative_to(docs.parent).as_posix() for path in sorted(docs.rglob("*.md"))]
    named = {NAMES.get(file, Path(file).stem): file for file in files}
    return {name: file for file, name in NAMES.items()} | named


def write(texts: Mapping[str, str], folder: Path) -> None:
    """Writes all pages, and their pictures, into a folder."""
    docs = locate.bundled("docs")
    root = docs.parent  # of the paths of Markdown files
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(docs / "images", folder / "images", dirs_exist_ok=True)
    names = {file: name for name, file in texts.items()}
    for name, file in texts.items():
        text = (root / file).read_text(encoding="utf-8")
        page = page_of(text, file, names)
        (folder / f"{name}.html").write_text(page, encoding="utf-8")


def page_of(text: str, file: str, pages: Mapping[str, str]) -> str:
    """A page as HTML.

    Args:
        text: Markdown, whose links are those of the repository.
        file: that it comes from.
        pages: file -> name of its page.
    """
    markdown = MarkdownIt("commonmark").enable("table")
    tokens = markdown.parse(text)
    title = give_anchors(tokens)
    inside = [child for token in tokens for child in token.children or ()]
    for token in inside:
        for attribute in ("href", "src"):
            target = token.attrGet(attribute)
            if target is not None:
                token.attrSet(attribute, link_of(str(target), file, pages))
    body = markdown.renderer.render(tokens, markdown.options, {})
    return (
        '<!doctype html><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style>"
        f'<nav><a href="{FIRST}.html">meshtrain</a> · <a href="{CONTENTS}.html">all pages</a></nav>'
        f"{body}"
    )


def give_anchors(tokens: list[Token]) -> str:
    """Gives each heading the id to which links of GitHub's form lead; returns the first heading."""
    title = ""
    seen: dict[str, int] = {}
    for opening, content in itertools.pairwise(tokens):
        if opening.type != "heading_open":
            continue
        words = re.sub(r"[`*]", "", content.content)
        title = title or words
        slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        before = seen.get(slug, 0)
        seen[slug] = before + 1
        opening.attrSet("id", f"{slug}-{before}" if before else slug)
    return title


def link_of(target: str, file: str, pages: Mapping[str, str]) -> str:
    """Where a link of a file leads among the pages; to a file that has none, in the repository on
    the web."""
    if IS_ELSEWHERE.match(target):
        return target
    path, mark, heading = target.partition("#")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(file), path))
    if path == "docs":
        path = "docs/README.md"
    if path in pages:
        return f"{pages[path]}.html{mark}{heading}"
    if path.startswith("docs/images/"):
        return path.removeprefix("docs/")
    return f"{SOURCE}{path}{mark}{heading}"
