"""Code that the tests of shardwise.horovod share."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

import shardwise.horovod as hvd
from tests.disk import wait_until

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
WHOLE = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
NUMBERS = [*FLOATS, *WHOLE, torch.complex64]
ALL = [*NUMBERS, torch.bool]
SHAPES = [(), (1,), (5,), (3, 4), (0,), (2, 0, 3), (4096, 5)]
SIZES = (1, 2, 3, 4)


@contextmanager
def initialized() -> Iterator[None]:
    """Between init and shutdown, which leaves no thread behind."""
    before = {thread.name for thread in threading.enumerate()}
    hvd.init()
    try:
        yield
    finally:
        hvd.shutdown()
        wait_until(lambda: {thread.name for thread in threading.enumerate()} <= before)


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return small integers, so that sums are exact in every dtype."""
    draw = torch.Generator().manual_seed(1000 * rank + len(shape))
    return torch.randint(0, 9, shape, generator=draw).to(dtype)
