"""The table of docs/known-errors.md, from errors.yaml:

python -m tests.known_errors.page        writes it into the page
"""

from pathlib import Path

from tests.known_errors.rows import ERRORS, PLAYS, Error, Play

PAGE = Path(__file__).parents[2] / "docs" / "known-errors.md"
FIRST = "| whose | what happened | composition | the test here | result |\n"


def table() -> str:
    """A row for each error, in Markdown."""
    lines = [FIRST, "| --- | --- | --- | --- | --- |\n"]
    for error in ERRORS:
        play = PLAYS[error.play]
        cells = [_threads(error), error.happened, error.composition, _test(play), _result(error)]
        lines.append(f"| {' | '.join(cells)} |\n")
    return "".join(lines)


def _threads(error: Error) -> str:
    links = []
    for thread in error.threads:
        repository, _, number = thread.rsplit("/", 2)
        links.append(f"[{repository}#{number}](https://github.com/{thread})")
    return ", ".join(links)


def _test(play: Play) -> str:
    file, _, name = play.test.partition("::")
    return f"`{file.removeprefix('tests/')}` `[{name.partition('[')[2]}`"


def _result(error: Error) -> str:
    play = PLAYS[error.play]
    result = "equal" if play.refused is None else f"refused: “{play.refused}”"
    return result if error.ours is None else f"{result}. Ours too: {error.ours}"


def main() -> None:
    before, first, behind = PAGE.read_text().partition(FIRST)
    if not first:
        raise SystemExit(f"{PAGE} has no table that begins with\n{FIRST}")
    rows = behind.splitlines(keepends=True)
    while rows and rows[0].startswith("|"):
        rows.pop(0)
    PAGE.write_text(before + table() + "".join(rows))


if __name__ == "__main__":
    main()
