"""Limits for a step in mid-run: host synchronisations, kernels, bytes."""

import pytest

from tests.phantom import cases

PRECISIONS = ("fp32", "bf16", "bf16-mixed", "fp16-mixed")
ON_DEVICE = [
    *(({"zero": row, "precision": p}, "Model") for row in range(4) for p in PRECISIONS),
    *(
        ({"zero": row, "sync_batch_norm": sync}, "ConvNet")
        for row in range(4)
        for sync in (False, True)
    ),
]
OFTEN = [
    ({"zero": 0, "precision": "fp32"}, "Model"),
    ({"zero": 3, "precision": "fp32"}, "Model"),
    ({"zero": 1, "sync_batch_norm": True}, "ConvNet"),
]
"""The rows in `make test`."""


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        pytest.param(*case, marks=() if case in OFTEN else pytest.mark.full, id=str(case))
        for case in ON_DEVICE
    ],
)
def test_host_waits_once_per_step(phantom, settings, kind):
    """A norm, a loss scale, a check for NaN and figures need no further wait.

    The vector that ranks exchange has all of them.
    """
    for waits, _, _ in phantom(2, cases.one_step, settings, kind):
        assert sum(waits.values()) <= 1, "\n".join(f"{n} {k}" for k, n in waits.items())


@pytest.mark.parametrize("layers", [3, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize(("options", "others"), [({}, 1), ({"balance": 0.1, "bias_rate": 0.1}, 2)])
def test_host_waits_once_per_layer_with_experts(phantom, layers, options, others):
    """For the numbers of rows to exchange. The step and the router losses need a wait each."""
    for waits in phantom(2, cases.expert_step, layers, options):
        found = "\n".join(f"{n} {k}" for k, n in waits.items())
        assert sum(waits.values()) <= layers + others, found


ON_HOST = [
    ({"zero": 0, "offload_optimizer": "cpu"}, 2),
    ({"zero": 2, "offload_optimizer": "cpu"}, 2),
    *(
        pytest.param(*case, marks=pytest.mark.full)
        for case in (
            ({"zero": 1, "offload_optimizer": "cpu"}, 2),
            ({"zero": 3, "offload_optimizer": "cpu"}, 2),
            # Before parameters are written: the copies for forward and for backward.
            ({"zero": 3, "offload_optimizer": "cpu", "offload_params": "cpu"}, 3),
        )
    ),
]


@pytest.mark.parametrize(("settings", "events"), ON_HOST, ids=str)
def test_states_on_the_host_wait_for_copies_from_the_device(phantom, settings, events):
    """Once per bucket's gradients, and before an update overwrites values that are sent."""
    for waits, _, buckets in phantom(2, cases.one_step, settings):
        others = {k: n for k, n in waits.items() if "states/storage/host_storage.py" not in k}
        assert sum(others.values()) <= 1, others
        assert sum(waits.values()) - 1 <= events * buckets, waits


@pytest.mark.parametrize("row", [2, *(pytest.param(r, marks=pytest.mark.full) for r in (0, 1))])
def test_kernels_per_step_depend_on_buckets_only(phantom, row):
    def kernels(**shape):
        settings = {"zero": row, "bucket_mb": 64.0}
        found = phantom(1, cases.one_step, settings, "Model", *shape.values())
        assert found[0][2] == 1
        return found[0][1]

    few = kernels(width=32, blocks=1)
    assert kernels(width=32, blocks=4) == few
    assert kernels(width=512, blocks=1) <= few + 4


def test_kernels_of_a_step_do_not_grow_with_batch_norms(phantom):
    def kernels(convolutions):
        settings = {"zero": 1, "bucket_mb": 64.0}
        found = phantom(2, cases.one_step, settings, "ConvNet", cases.WIDTH, convolutions)
        assert {buckets for _, _, buckets in found} == {1}
        return [count for _, count, _ in found]

    assert kernels(6) == kernels(2)


def test_weight_on_the_device_costs_one_worker_nothing(phantom):
    """The weight cancels out if it is the only one of the step."""
    kernels = {}
    for kind in ("read", "said"):
        ((kernels[kind], waits),) = phantom(1, cases.backward_kernels, 0, kind)
        assert not waits
    assert kernels["read"] <= kernels["said"] + 2, kernels


def test_weight_on_the_device_costs_few_kernels_per_bucket(phantom):
    more = {}
    for blocks in (1, 4):
        found = [
            [kernels for kernels, _ in phantom(2, cases.backward_kernels, 1, kind, blocks)]
            for kind in ("read", "said")
        ]
        more[blocks] = [read - said for read, said in zip(*found, strict=True)]
    assert more[4] == more[1]


@pytest.mark.parametrize("zero", [pytest.param(0, marks=pytest.mark.full), 2])
def test_second_backward_after_a_cancelled_weight(phantom, zero):
    phantom(1, cases.several_backwards, zero)


@pytest.mark.full
def test_kernels_per_step_of_sharded_parameters_depend_on_units_only(phantom):
    def found(**shape):
        settings = {"zero": 3, "bucket_mb": 64.0}
        (_, kernels, buckets), _ = phantom(2, cases.one_step, settings, "Model", *shape.values())
        return kernels, buckets

    few, several, many = (found(width=32, blocks=count) for count in (3, 5, 7))
    assert several[1] - few[1] == many[1] - several[1] == 2
    assert several[0] - few[0] == many[0] - several[0]
    wide, buckets = found(width=512, blocks=3)
    assert buckets == few[1]
    assert wide <= few[0] + 4 * buckets


BYTES = {
    "fp32": (4, 4, 8, 0),
    "bf16": (2, 2, 12, 0),
    "bf16-mixed": (4, 4, 8, 2),
    "fp16-mixed": (4, 4, 8, 2),
}
"""By precision, bytes per parameter of parameters, gradients, optimizer state and casts.

The optimizer state includes fp32 masters. Autocast keeps casts from forward to backward, but none
of sharded parameters.
"""

UNIT = 2 * 256 * 512
"""Parameters of a block, without biases."""


@pytest.mark.parametrize(
    ("row", "precision"),
    [
        pytest.param(r, p, marks=() if (r, p) == (3, "bf16") else pytest.mark.full)
        for r in range(4)
        for p in BYTES
    ],
)
def test_bytes_on_the_device_match_the_table(phantom, row, precision):
    """In addition to the table: gradients in collectives, gathered units, activations."""
    parameters, gradients, optimizer, casts = BYTES[precision]
    per_parameter = (
        parameters / (2 if row == 3 else 1)
        + gradients / (2 if row >= 2 else 1)
        + optimizer / (2 if row >= 1 else 1)
    )
    beside = (row >= 2) * 6 * cases.BUCKET_MB * 2**20 + (row == 3) * 4 * parameters * UNIT
    settings = {"zero": row, "precision": precision}
    for count, at_rest, after_forward in phantom(2, cases.bytes_held, settings, {}):
        table = per_parameter * count
        assert table <= at_rest <= 1.001 * table + beside
        assert after_forward <= at_rest + ((row < 3) * casts + 0.15) * count
