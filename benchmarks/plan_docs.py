"""Puts tables that commands have printed into docs/plan_accuracy.md, each in its own section."""

from collections.abc import Sequence
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "plan_accuracy.md"


def put(title: str, lines: Sequence[str], page: Path = PAGE) -> None:
    """Let the section `title` of `page` be `lines`: in its place, or at the end where there is
    none."""
    before, *sections = ("\n" + page.read_text().rstrip()).split("\n## ")
    made = f"{title}\n\n" + "\n".join(lines).strip() + "\n"
    kept = [made if each.split("\n", 1)[0] == title else each for each in sections]
    if made not in kept:
        kept.append(made)
    page.write_text("\n## ".join([before.strip() + "\n", *(f"{each.strip()}\n" for each in kept)]))
