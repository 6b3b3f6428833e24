"""Writes the tables of DeepSpeed's keys into docs/reference/deepspeed_keys.md, from the code."""

from pathlib import Path

from shardwise.config import deepspeed

BEGIN, END = "<!-- keys: begin -->\n", "<!-- keys: end -->"


def main() -> None:
    """Put the tables between the two marks of the document."""
    path = Path(__file__).parents[1] / "docs" / "reference" / "deepspeed_keys.md"
    before, _, rest = path.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    path.write_text(f"{before}{BEGIN}{deepspeed.table()}{END}{after}")


if __name__ == "__main__":
    main()
