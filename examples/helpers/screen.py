"""The output of the main rank while an example runs: lines, and a progress bar in a terminal."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console, RenderableType

import shardwise as sw
from helpers.log import bar


class Screen:
    """A progress bar of `total` steps below lines of text. Other ranks than the main one are
    silent.

    It is a context manager.
    """

    def __init__(self, world: sw.World, total: int) -> None:
        self._console = Console(quiet=not world.is_main, highlight=False, markup=False)
        self._bar = bar(self._console) if world.is_main and self._console.is_terminal else None
        self._total = total

    def __enter__(self) -> Screen:
        if self._bar:
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total, figures="")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar:
            self._bar.stop()

    def stepped(self, figures: str = "") -> None:
        """Advance the bar by one step, with `figures` next to it."""
        if self._bar:
            self._bar.update(self._task, advance=1, figures=figures)

    def say(self, what: RenderableType) -> None:
        """Print something, above the bar if there is one."""
        self._console.print(what, soft_wrap=isinstance(what, str))
