"""Which layers a stage of a PipelineModule has."""

import pytest

from shardwise.deepspeed.pipe.partition import starts_of

NAMES = ["Words", "lambda", "Block", "Block", "Block", "LayerNorm", "Words"]
SIZES = [50, 0, 10, 10, 10, 2, 50]
ADDS = [True, False, True, True, True, True, False]


@pytest.mark.parametrize(
    ("method", "stages", "starts"),
    [
        ("uniform", 2, [0, 4]),
        ("uniform", 3, [0, 3, 5]),
        ("uniform", 7, [0, 1, 2, 3, 4, 5, 6]),
        ("parameters", 2, [0, 4]),
        ("parameters", 3, [0, 1, 5]),  # the last Words layer shares all parameters with the first
        ("PARAMETERS", 1, [0]),
        ("type:block", 3, [0, 3, 4]),
        ("type:Block|Norm", 2, [0, 4]),
    ],
)
def test_starts(method, stages, starts):
    assert starts_of(method, NAMES, SIZES, ADDS, stages) == starts
