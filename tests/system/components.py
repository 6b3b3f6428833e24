"""Checks for programs, other than Python packages, that some tests need."""

import os

import pytest

VARIABLE = "TESTS_REQUIRE"
"""Components, separated by commas, whose tests may not be skipped. Set by .ci/run.

It is not named SHARDWISE_..., because such a variable would be rejected as an unknown setting.
"""


def need(component: str, absent: str | None) -> None:
    """Skip the test if `component` is missing (for the reason `absent`), or fail if required."""
    if absent is None:
        return
    if component in os.environ.get(VARIABLE, "").split(","):
        pytest.fail(f"{VARIABLE} asks for {component}, but: {absent}")
    pytest.skip(absent)
