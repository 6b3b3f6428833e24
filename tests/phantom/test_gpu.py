"""The functions of tests/gpu on the simulated device: equal to plain PyTorch, and in order.

tests/gpu/test_overlap.py is about time, which does not pass here.
"""

import pytest
import torch

from tests.disk import on_a_disk
from tests.gpu import test_activations, test_checkpoint, test_memory, test_precision, test_rows
from tests.gpu import training as gpu

STEPS = 3
"""Enough steps for every buffer to be used, returned and used again."""


def brief(world, function, *args, steps=STEPS):
    """Fewer steps than on a GPU, because time does not matter here."""
    before, gpu.STEPS = gpu.STEPS, steps
    try:
        return function(world, *args)
    finally:
        gpu.STEPS = before


def rest(cases, *chosen):
    """Mark all of `cases` except the `chosen` ones for `make test-all`."""
    return [
        pytest.param(*case, marks=() if case in chosen else pytest.mark.full, id=str(case))
        for case in cases
    ]


OVER_NCCL = [
    (0, {"optimizer": "cpu"}),
    (1, {}),
    (2, {"optimizer": "device", "gradients": "nvme"}),
    (3, {"optimizer": "nvme", "params": "cpu"}),
]
"""Each row, and each tier; test_two_ranks.py has more of them with two ranks."""


@pytest.mark.parametrize(("row", "named"), rest(test_rows.CASES, *OVER_NCCL))
def test_one_rank_over_nccl(phantom, row, named):
    phantom(1, brief, test_rows.as_plain, row, named, torch.float64, 2)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("case", test_rows.CASES, ids=str)
def test_a_plain_python_process(phantom, case, dtype):
    phantom(1, test_rows.as_plain_alone, *case, dtype, 2)


OVER_GLOO = [(2, {"optimizer": "cpu"})]


@pytest.mark.parametrize(("row", "named"), rest(test_rows.CASES, *OVER_GLOO))
def test_two_ranks_of_one_gpu_over_gloo(phantom, row, named):
    function = test_rows.as_plain
    phantom(2, brief, function, row, named, torch.float64, 1, transport="gloo")


@pytest.mark.parametrize(
    ("row", "named"),
    rest([(0, {}), (1, {"optimizer": "cpu"}), (3, {"optimizer": "nvme"})], (0, {})),
)
def test_state_is_carried_over(phantom, row, named):
    phantom(1, test_rows.carried_over, row, named)


PRECISION = [
    pytest.param(test_precision.bf16_mixed, (), marks=pytest.mark.full),
    (test_precision.fp16_mixed, ()),
    pytest.param(test_precision.bf16, (1,), marks=pytest.mark.full),
    (test_precision.bf16, (3,)),
]


@pytest.mark.parametrize(
    ("row", "named"), rest(test_precision.ROWS, (3, {"params": "cpu", "optimizer": "cpu"}))
)
@pytest.mark.parametrize(("function", "more"), PRECISION, ids=lambda p: getattr(p, "__name__", p))
def test_presets(phantom, function, more, row, named):
    phantom(1, overflowing, function, row, named, *more)


def overflowing(world, function, *args):
    """Enough steps for one that is skipped because fp16 overflows, and one after it."""
    return brief(world, function, *args, steps=max(test_precision.OVERFLOW) + 2)


@pytest.mark.parametrize(
    ("row", "how"),
    rest(
        [
            (row, how)
            for row in (0, 2, 3)
            for how in ("recomputed", "cpu", "nvme", "recomputed and cpu")
        ],
        (2, "recomputed and cpu"),
        (0, "nvme"),
    ),
)
def test_offloaded_activations(phantom, row, how):
    settings = {"activations": "recomputed"} if "recomputed" in how else {}
    if how.endswith("cpu"):
        settings["offload_activations"] = "cpu"
    if how == "nvme":
        settings["offload_activations"] = f"nvme:{on_a_disk()}"
    phantom(1, brief, activations, row, settings)


def activations(world, row, settings):
    """Smaller tensors, still large enough to be offloaded."""
    test_activations.WIDE = {"width": 256, "rows": 256}
    test_activations.same_bits(world, row, settings)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(
    ("row", "named"),
    rest(test_checkpoint.CASES, (3, {"optimizer": "cpu", "params": "cpu"})),
)
def test_saved_and_loaded(phantom, tmp_path, row, named, background):
    phantom(1, test_checkpoint.case, tmp_path, row, named, background)


MEMORY = [
    (row, named) for row in range(4) for named in ({}, {"optimizer": "cpu"}, {"optimizer": "nvme"})
]


@pytest.mark.full  # test_budgets.py has the bytes of small models, with closer limits
@pytest.mark.parametrize(("row", "named"), [*MEMORY, (3, {"optimizer": "cpu", "params": "cpu"})])
def test_device_memory(phantom, row, named):
    for count, between, peak, has_optimizer in phantom(1, test_memory.held, row, named):
        formula = test_memory.expected(count, 1, row, named)
        assert formula * 0.98 <= peak
        assert between <= formula * 1.02 + test_memory.SLACK
        assert peak <= formula * 1.02 + test_memory.SLACK
        assert has_optimizer == (named.get("optimizer", "device") == "device")
