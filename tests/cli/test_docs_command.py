"""`meshtrain docs`: each page with links that lead somewhere, opened in the user's browser."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from meshtrain.cli import docs, main
from tests.documents import REPO


class Page(HTMLParser):
    """The links, pictures and headings of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value is not None:
                self.targets.append(value)
            if name == "id" and value is not None:
                self.ids.add(value)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Page]:
    folder = tmp_path_factory.mktemp("docs")
    docs.write(docs.sources(), folder)
    assert (folder / "images" / "mesh.png").is_file()
    return {path.name: Page(path.read_text()) for path in folder.glob("*.html")}


def test_each_link_leads_to_a_page_a_heading_or_a_file_of_the_repository(
    pages: dict[str, Page],
) -> None:
    assert len(pages) == len(docs.sources())
    for name, page in pages.items():
        for target in page.targets:
            if target.startswith(docs.SOURCE):
                path = target.removeprefix(docs.SOURCE).partition("#")[0]
                assert (REPO / path).exists(), (name, target)
            elif not re.match(r"https?:", target):
                file, _, heading = target.partition("#")
                if file.startswith("images/"):
                    assert (REPO / "docs" / file).is_file(), (name, target)
                    continue
                there = pages[file or name]
                assert not heading or heading in there.ids, (name, target)


def test_it_opens_the_page_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(docs.webbrowser, "open", lambda address: opened.append(address) or True)
    assert main.main(["docs", "docs/layouts.md", "--folder", str(tmp_path)]) == 0
    address = (tmp_path / "layouts.html").as_uri()
    assert opened == [address]
    assert capsys.readouterr().out == f"{address}\n"
    text = (tmp_path / "layouts.html").read_text()
    assert "<h1" in text
    assert "<table>" in text


def test_a_page_that_is_not_there_is_an_error_with_the_nearest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main.main(["docs", "layout"]) == 2
    assert "no page 'layout' (did you mean layouts?)" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert main.main(["docs", "--folder", str(file)]) == 2
    assert f"cannot write {file}" in capsys.readouterr().err
