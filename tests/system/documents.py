"""Extracts the code blocks of README.md and the guides, in the form in which tests run them."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
LANGUAGES = {"sh", "python", "diff", "text"}
"""Languages of shell commands, programs, file changes, and output."""

_FENCE = re.compile(
    r"^(?:<!-- not run: (?P<why>[^\n]+) -->\n)?```(?P<language>[^\n]*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a document.

    `why` is the reason not to run it, from the comment above it.
    """

    language: str
    text: str
    why: str | None

    @property
    def commands(self) -> Iterator[list[str]]:
        """Yield the words of each shell command, without comments."""
        if self.language != "sh":
            return
        for line in self.text.replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                yield words

    @property
    def after(self) -> str:
        """Return the text after applying the diff."""
        lines = self.text.splitlines()
        return "\n".join(line[1:] for line in lines if not line.startswith("-"))


def blocks(document: Path) -> list[Block]:
    """Return the blocks of a document, in order."""
    return [
        Block(found["language"], found["text"], found["why"])
        for found in _FENCE.finditer(document.read_text())
    ]


def python_of(document: Path) -> str:
    """Return all runnable Python blocks of a document as one program."""
    return "\n".join(
        block.text for block in blocks(document) if block.language == "python" and not block.why
    )


def name(document: Path) -> str:
    """Return the test name for a document."""
    return str(document.relative_to(ROOT))
