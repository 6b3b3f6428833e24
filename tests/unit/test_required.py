"""Tests of components listed in TESTS_REQUIRE may not be skipped."""

import pytest

from tests import conftest


def test_an_absent_library_that_is_required_ends_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conftest, "LIBRARIES", ("json", "no_such_library"))
    monkeypatch.setenv("TESTS_REQUIRE", "ssh,json")
    conftest._check_packages()
    monkeypatch.setenv("TESTS_REQUIRE", "json,no_such_library")
    with pytest.raises(pytest.UsageError, match="asks for no_such_library, not installed"):
        conftest._check_packages()
