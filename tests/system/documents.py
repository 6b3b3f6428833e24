"""The blocks of README.md and of the guides, as the tests run them."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
LANGUAGES = {"sh", "python", "diff", "text"}
"""What is typed, what is run, what changes in a file, and what is shown."""

_FENCE = re.compile(
    r"^(?:<!-- not run: (?P<why>[^\n]+) -->\n)?```(?P<language>[^\n]*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a document; `why` it is not run, where a comment above it says so."""

    language: str
    text: str
    why: str | None

    @property
    def commands(self) -> Iterator[list[str]]:
        """The words of each command that is typed, without comments."""
        if self.language != "sh":
            return
        for line in self.text.replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                yield words

    @property
    def after(self) -> str:
        """The text that a diff leads to."""
        lines = self.text.splitlines()
        return "\n".join(line[1:] for line in lines if not line.startswith("-"))


def blocks(document: Path) -> list[Block]:
    """The blocks of a document, in order."""
    return [
        Block(found["language"], found["text"], found["why"])
        for found in _FENCE.finditer(document.read_text())
    ]


def python_of(document: Path) -> str:
    """All Python blocks of a document that are run, as one program."""
    return "\n".join(
        block.text for block in blocks(document) if block.language == "python" and not block.why
    )


def name(document: Path) -> str:
    """How a test is called after its document."""
    return str(document.relative_to(ROOT))
