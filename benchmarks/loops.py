"""Turns a training loop that a library owns into a function of one step, as contenders have it.

The caller's thread gives a batch and waits; the library's loop, in a thread of its own, trains,
gives the loss back when its step is over, and waits for the next batch.
"""

from collections.abc import Callable, Iterator
from queue import SimpleQueue
from threading import Thread

from torch import Tensor

Batch = tuple[Tensor, Tensor]
Run = Callable[[Iterator[Batch], Callable[[Tensor], None]], None]
"""Trains on the batches, and calls the function with the loss after each step."""


class Loop:
    """Runs `run` beside its caller: one of the two works while the other waits.

    The hand-over costs some 50 us a step, alike for all whose library owns the loop.
    """

    def __init__(self, run: Run) -> None:
        self._given: SimpleQueue[Batch] = SimpleQueue()
        self._over: SimpleQueue[Tensor | BaseException] = SimpleQueue()
        Thread(target=self._train, args=(run,), daemon=True).start()

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Let the loop train one step; returns its loss, raises what the loop has raised."""
        self._given.put((inputs, targets))
        found = self._over.get()
        if isinstance(found, BaseException):
            raise found
        return found

    def _train(self, run: Run) -> None:
        try:
            run(self._batches(), self._over.put)
        except BaseException as error:
            self._over.put(error)

    def _batches(self) -> Iterator[Batch]:
        while True:
            yield self._given.get()
