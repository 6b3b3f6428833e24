"""Operations without tensors: join and barrier."""

from __future__ import annotations

from shardwise.horovod.asking import ask, wait
from shardwise.horovod.context import current
from shardwise.horovod.process_sets import ProcessSet, global_process_set
from shardwise.horovod.requests import JOIN


def join(device: int = -1) -> int:
    """Say that this rank has no more data, and wait for the others; the rank that joined last.

    Until then it takes part in every allreduce of all ranks, with zeros. `device` is there for
    Horovod's sake: zeros are made where the others' tensors are.
    """
    del device
    context = current()
    last = wait(ask(JOIN, [], JOIN, global_process_set))
    for counted in [name for name in context.numbers if "noname" in name]:
        del context.numbers[counted]  # ranks have made different numbers of calls without a name
    return int(last)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank has come."""
    wait(ask("barrier", [], None, process_set))
