"""Two ranks over NCCL on the simulated device: results equal CPU ranks', and are in order."""

import itertools
import threading

import pytest
import torch

from tests.phantom import cases

CLOSE = {"rtol": 1e-8, "atol": 1e-10}


def same(phantom, group, function, *args, **tolerance):
    """Compare the simulated ranks with CPU ranks."""
    found = phantom(2, function, *args)
    wanted = group(2, transport="gloo")(function, *args)
    for one, two in zip(found, wanted, strict=True):
        for a, b in zip(one, two, strict=True):
            torch.testing.assert_close(a, b, **(tolerance or CLOSE))


TIERS = ("device", "cpu", "nvme")
PRECISIONS = ("fp32", "bf16-mixed", "bf16", "fp16-mixed")
STATES = ("optimizer", "gradients", "params")
"""The states that can be on another tier: those that a row shards, and the optimizer's always."""

SHARDED = {0: 1, 1: 1, 2: 2, 3: 3}
PRODUCT = [
    (row, tiers, precision)
    for row, count in SHARDED.items()
    for tiers in itertools.product(TIERS, repeat=count)
    for precision in PRECISIONS
]
"""Tiers of optimizer state, gradients and parameters, and the precision, by ZeRO stage."""

OFTEN = [
    (0, ("device",), "fp32"),
    (1, ("cpu",), "bf16"),
    (2, ("cpu", "cpu"), "bf16-mixed"),
    (3, ("cpu", "cpu", "cpu"), "bf16"),
    (3, ("nvme", "device", "nvme"), "fp16-mixed"),
]


def test_product_has_all_legal_combinations():
    assert len(PRODUCT) == 4 * (3 + 3 + 9 + 27)
    assert set(OFTEN) <= set(PRODUCT)


@pytest.mark.parametrize(
    ("row", "where", "precision"),
    [
        pytest.param(
            *case,
            marks=() if case in OFTEN else pytest.mark.full,
            id=f"{case[0]}-{'-'.join(case[1])}-{case[2]}",
        )
        for case in PRODUCT
    ],
)
def test_rows_tiers_and_precisions(phantom, group, row, where, precision):
    named = dict(zip(STATES, where, strict=False))
    settings = {"zero": row, "precision": precision}
    same(phantom, group, cases.by_precision, settings, named, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("row", [*(pytest.param(row, marks=pytest.mark.full) for row in (0, 2)), 3])
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
    "settings",
    [
        {"zero": 0},
        {"zero": 3, "offload_optimizer": "cpu"},
        pytest.param({"zero": 3}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_user_stream(phantom, group, settings):
    same(phantom, group, cases.on_a_stream_of_its_own, settings)


@pytest.mark.parametrize("row", [2, pytest.param(3, marks=pytest.mark.full)])
def test_layers_split_over_the_ranks(phantom, group, row):
    same(phantom, group, cases.split, {"zero": row}, {"tensor": 2})


@pytest.mark.parametrize(
    "schedule",
    ["1f1b", *(pytest.param(s, marks=pytest.mark.full) for s in ("gpipe", "interleaved"))],
)
def test_layers_distributed_over_ranks(phantom, group, schedule):
    settings = {"schedule": schedule, "microbatches": 4}
    same(phantom, group, cases.split, settings, {"pipeline": 2})


@pytest.mark.full  # on a stream of the user's below
def test_horovod(phantom, group):
    same(phantom, group, cases.horovod)


def test_horovod_on_user_stream(phantom, group):
    same(phantom, group, cases.horovod_on_a_stream_of_its_own)


def threads_at_a_device(world):
    """Return the threads that have selected the device of this rank."""
    real, seen = torch.accelerator.set_device_index, []

    def noted(index):
        seen.append((threading.current_thread().name, index))
        real(index)

    torch.accelerator.set_device_index = noted
    try:
        cases.horovod(world)
    finally:
        torch.accelerator.set_device_index = real
    return seen


def test_horovod_thread_uses_the_device_of_its_rank(phantom):
    """Otherwise a rank of another GPU would have a context on the first one, too."""
    for seen in phantom(2, threads_at_a_device):
        assert seen == [("shardwise-horovod", 0)]
