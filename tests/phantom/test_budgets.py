"""What a step in mid-run may ask for: host synchronisations, kernels, bytes."""

import pytest

from tests.phantom import cases

ON_DEVICE = [
    *(({"zero": row, "precision": p}, "Model") for row in range(4) for p in ("fp32", "bf16")),
    ({"zero": 2, "precision": "fp16-mixed"}, "Model"),
    ({"zero": 1}, "ConvNet"),
    ({"zero": 1, "sync_batch_norm": True}, "ConvNet"),
]


@pytest.mark.parametrize(("settings", "kind"), ON_DEVICE, ids=str)
def test_the_host_waits_once_a_step(phantom, settings, kind):
    """None more for a norm, a loss scale, a NaN to be found or figures to be read: the row that
    ranks exchange has all of them."""
    for waits, _, _ in phantom(2, cases.one_step, settings, kind):
        assert sum(waits.values()) <= 1, "\n".join(f"{n} {k}" for k, n in waits.items())


ON_HOST = [
    ({"zero": 0, "offload_optimizer": "cpu"}, {"states/on_host.py"}),
    ({"zero": 2, "offload_optimizer": "cpu"}, {"states/on_host.py"}),
]


@pytest.mark.parametrize(("settings", "places"), ON_HOST, ids=str)
def test_with_states_on_the_host_it_waits_for_what_comes_down(phantom, settings, places):
    """Once for each bucket's gradients, and before an update writes what goes up."""
    for waits, _, buckets in phantom(2, cases.one_step, settings):
        others = {k: n for k, n in waits.items() if not any(place in k for place in places)}
        assert sum(others.values()) <= 1, others
        assert sum(waits.values()) - 1 <= 2 * buckets, waits


@pytest.mark.parametrize("row", [0, 1, 2])
def test_kernels_of_a_step_grow_with_buckets_alone(phantom, row):
    def kernels(**shape):
        settings = {"zero": row, "bucket_mb": 64.0}
        found = phantom(1, cases.one_step, settings, "Model", *shape.values())
        assert found[0][2] == 1
        return found[0][1]

    few = kernels(width=32, blocks=1)
    assert kernels(width=32, blocks=4) == few
    assert kernels(width=512, blocks=1) <= few + 4
