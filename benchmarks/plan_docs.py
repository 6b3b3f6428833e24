"""Writes the tables of the planning benchmarks into docs/plan_accuracy.md, one per section."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "plan_accuracy.md"


def put(title: str, lines: Sequence[str], page: Path = PAGE) -> None:
    """Replace the section `title` of `page` by `lines`, or append it if it is missing."""
    before, *sections = ("\n" + page.read_text().rstrip()).split("\n## ")
    made = f"{title}\n\n" + "\n".join(lines).strip() + "\n"
    kept = [made if each.split("\n", 1)[0] == title else each for each in sections]
    if made not in kept:
        kept.append(made)
    page.write_text("\n## ".join([before.strip() + "\n", *(f"{each.strip()}\n" for each in kept)]))
