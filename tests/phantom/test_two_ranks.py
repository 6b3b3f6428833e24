"""Two ranks over NCCL, as it orders things: what CPU ranks come to over Gloo, and in order."""

import itertools

import pytest
import torch

from tests.phantom import cases

CLOSE = {"rtol": 1e-8, "atol": 1e-10}


def same(phantom, group, function, *args, **tolerance):
    """The simulated ranks against those of the CPU."""
    found = phantom(2, function, *args)
    wanted = group(2, transport="gloo")(function, *args)
    for one, two in zip(found, wanted, strict=True):
        for a, b in zip(one, two, strict=True):
            torch.testing.assert_close(a, b, **(tolerance or CLOSE))


TIERS = [
    {},
    {"optimizer": "cpu"},
    {"optimizer": "nvme"},
    {"optimizer": "cpu", "gradients": "nvme"},
    {"optimizer": "cpu", "params": "cpu"},
    {"optimizer": "nvme", "params": "nvme"},
]
OFTEN = [
    (0, {}, "fp32"),
    (1, {"optimizer": "cpu"}, "bf16"),
    (2, {}, "bf16"),
    (2, {"optimizer": "cpu"}, "bf16-mixed"),
    (3, {}, "bf16-mixed"),
    (3, {"optimizer": "cpu", "params": "cpu"}, "bf16"),
]
PRODUCT = [
    pytest.param(
        *case, marks=() if case in OFTEN else pytest.mark.full, id="-".join(map(str, case))
    )
    for case in itertools.product(range(4), TIERS, ("fp32", "bf16-mixed", "bf16", "fp16-mixed"))
    if case[0] >= 3 * ("params" in case[1]) and case[0] >= 2 * ("gradients" in case[1])
]


@pytest.mark.parametrize(("row", "named", "precision"), PRODUCT)
def test_rows_tiers_and_precisions(phantom, group, row, named, precision):
    settings = {"zero": row, "precision": precision}
    same(phantom, group, cases.by_precision, settings, named, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("row", [0, 2, 3])
def test_in_fp64(phantom, group, row):
    same(phantom, group, cases.stepped, {"zero": row, "ema_decay": 0.9})


@pytest.mark.parametrize("row", [1, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("sync", [False, True])
def test_batch_norm(phantom, group, sync, row):
    settings = {"zero": row, "sync_batch_norm": sync}
    same(phantom, group, cases.stepped, settings, "ConvNet")


@pytest.mark.parametrize("kind", ["Model", pytest.param("ConvNet", marks=pytest.mark.full)])
@pytest.mark.parametrize("row", [pytest.param(0, marks=pytest.mark.full), 2])
def test_the_exact_mode(phantom, group, row, kind):
    same(phantom, group, cases.exact, {"zero": row}, kind)


@pytest.mark.parametrize("row", [0, pytest.param(3, marks=pytest.mark.full)])
def test_batches_from_pinned_memory(phantom, group, row):
    same(phantom, group, cases.loaded, {"zero": row})


@pytest.mark.parametrize(
    "settings", [{"zero": 0}, {"zero": 3}, {"zero": 3, "offload_optimizer": "cpu"}], ids=str
)
def test_a_stream_of_the_users_own(phantom, group, settings):
    same(phantom, group, cases.on_a_stream_of_its_own, settings)


@pytest.mark.parametrize("row", [2, pytest.param(3, marks=pytest.mark.full)])
def test_layers_split_over_the_ranks(phantom, group, row):
    same(phantom, group, cases.split, {"zero": row}, {"tensor": 2})


@pytest.mark.parametrize(
    "schedule",
    ["1f1b", *(pytest.param(s, marks=pytest.mark.full) for s in ("gpipe", "interleaved"))],
)
def test_layers_shared_out(phantom, group, schedule):
    settings = {"schedule": schedule, "microbatches": 4}
    same(phantom, group, cases.split, settings, {"pipeline": 2})


def test_horovod(phantom, group):
    same(phantom, group, cases.horovod)


def test_horovod_on_a_stream_of_the_users_own(phantom, group):
    same(phantom, group, cases.horovod_on_a_stream_of_its_own)
