"""The order between the thread that communicates and the others, on an accelerator.

There a kernel is asked for long before it runs. What a thread has asked for by a moment comes
before what another one asks for after it has minded that moment. On the CPU there is nothing to do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class Moment:
    """A moment of the present stream; None is one that has passed."""

    def __init__(self, event: torch.cuda.Event | None = None) -> None:
        self._event = event

    @classmethod
    def now(cls, tensors: Sequence[Tensor]) -> Moment:
        """The present one, where `tensors` are on a GPU."""
        on_gpu = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        if on_gpu is None:
            return cls()
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(on_gpu))
        return cls(event)

    def before_now(self) -> None:
        """Let what this stream does from now on come after that moment."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


def used_here(tensors: Sequence[Tensor]) -> None:
    """Mind that tensors that another stream has made are used on the present one: their memory is
    not given to others before it has done what is asked for by then."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


class Side:
    """The stream that communication is asked for on; none for ranks on the CPU."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]

    @contextmanager
    def after(self, moment: Moment) -> Iterator[None]:
        """Inside the block what is asked for comes after `moment`."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            moment.before_now()
            yield

    def lend(self, tensors: Sequence[Tensor]) -> None:
        """Mind that tensors of other streams are used on this one."""
        if self._stream is not None:
            for tensor in tensors:
                if tensor.is_cuda:
                    tensor.record_stream(self._stream)
