"""Numbers as a person reads them."""

from __future__ import annotations


def in_bytes(number: int) -> str:
    """Bytes: 1.6 GB."""
    return _scaled(number, (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)), " ") or f"{number} B"


def in_short(number: int) -> str:
    """A count: 100.9M."""
    return _scaled(number, (("B", 1e9), ("M", 1e6), ("k", 1e3)), "") or str(number)


def many(count: int, name: str, ending: str = "s") -> str:
    """A count of things: 1 unit, 2 units."""
    return f"{count} {name}{'' if count == 1 else ending}"


def _scaled(number: int, scales: tuple[tuple[str, float], ...], gap: str) -> str:
    for unit, size in scales:
        if number >= size:
            return f"{number / size:.1f}{gap}{unit}"
    return ""
