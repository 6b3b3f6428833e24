"""The memory traffic of recorded operators."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.tools.plan.record import Operation
from shardwise.tools.plan.step_recorder import StepRecorder

ROWS = 8


def _operations(
    function: Callable[[Tensor], Tensor], length: int, *, on_cuda: bool
) -> list[Operation]:
    """Record `function` of an fp32 tensor of shape (ROWS, length), and its backward pass."""
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        x = torch.empty(ROWS, length, requires_grad=True)
    recorder = StepRecorder(fake)
    recorder.on_cuda = on_cuda
    with recorder:
        recorder.active = True
        loss = function(x).sum()
        recorder.backward = True
        loss.backward()  # type: ignore[no-untyped-call]
    recorder.end()
    return recorder.operations


@pytest.mark.parametrize(
    ("function", "name", "unvectorised"),
    [
        (lambda x: x.sin(), "sin", False),
        (lambda x: x + x, "add", False),
        (lambda x: x + x.t(), "add", True),
        (lambda x: x * x[0], "mul", True),
        (lambda x: x * 2, "mul", False),
        (lambda x: x.bfloat16(), "_to_copy", False),
        (lambda x: x.double(), "_to_copy", True),
        (lambda x: x + x.double(), "add", True),
        (lambda x: x.t().contiguous(), "clone", True),
        (lambda x: torch.cat([x, x]), "cat", False),
        (lambda x: torch.cat([x.t(), x.t()]), "cat", True),
        (lambda x: x @ x.t(), "mm", False),
    ],
)
def test_finds_kernels_without_vectors(
    function: Callable[[Tensor], Tensor], name: str, unvectorised: bool
) -> None:
    operations = _operations(function, ROWS, on_cuda=True)
    assert next(each.unvectorised for each in operations if each.name == name) is unvectorised


@pytest.mark.parametrize(
    ("function", "length", "name", "passes"),
    [
        # Input and result; three times the input if a row is longer than 48 KiB.
        (lambda x: x.log_softmax(1), 10_000, "_log_softmax", (2, 2)),
        (lambda x: x.log_softmax(1), 20_000, "_log_softmax", (2, 4)),
        (lambda x: x.log_softmax(1), 20_000, "_log_softmax_backward_data", (3, 4)),
        (lambda x: x.softmax(1), 20_000, "_softmax_backward_data", (3, 5)),
        (
            lambda x: torch.nn.functional.layer_norm(x, x.shape[1:]),
            20_000,
            "native_layer_norm_backward",
            (3, 5),
        ),
    ],
)
def test_counts_what_kernels_of_cuda_read_again(
    function: Callable[[Tensor], Tensor], length: int, name: str, passes: tuple[int, int]
) -> None:
    for on_cuda, count in zip((False, True), passes, strict=True):
        operations = _operations(function, length, on_cuda=on_cuda)
        moved = next(each.bytes for each in operations if each.name == name)
        assert moved == pytest.approx(count * ROWS * length * 4, rel=1e-3)
