"""What some tests need of the machine beside Python, and what is done where it is absent."""

import os

import pytest

VARIABLE = "TESTS_REQUIRE"
"""Names, with commas, of components whose tests may not be skipped; .ci/run sets it. Not called
SHARDWISE_...: such a variable would be a setting, and an unknown one is refused."""


def need(component: str, absent: str | None) -> None:
    """Skip the test when `component` is not here, for the reason `absent`; where it is required,
    fail."""
    if absent is None:
        return
    if component in os.environ.get(VARIABLE, "").split(","):
        pytest.fail(f"{VARIABLE} asks for {component}, but: {absent}")
    pytest.skip(absent)
