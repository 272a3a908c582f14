"""The fenced blocks of README and docs, and the files that they show."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block; `file` is the name that the text before it gives it, if it does."""

    language: str
    text: str
    file: str | None

    def commands(self) -> list[str]:
        """The commands of a `bash` block, continued lines joined."""
        joined = re.sub(r"\\\n\s*", "", self.text) if self.language == "bash" else ""
        return [
            line.strip()
            for line in joined.splitlines()
            if line.strip() and not line.startswith("#")
        ]


def blocks(document: Path) -> Iterator[Block]:
    text = document.read_text()
    for match in BLOCK.finditer(text):
        before = re.search(r"[Ww]ith this\s+`([\w.-]+)`\s*$", text[: match.start()])
        yield Block(match[1], match[2], before[1] if before else None)
