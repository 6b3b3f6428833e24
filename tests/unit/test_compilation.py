"""Checks before units are compiled."""

import pytest
import torch

from shardwise.errors import ConfigError
from shardwise.model.compilation import check_cpp_compiler


def test_names_the_missing_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "/none/c++")
    with pytest.raises(ConfigError, match=r"/none/c\+\+ is not installed.*start without --compile"):
        check_cpp_compiler(torch.device("cpu"))
    check_cpp_compiler(torch.device("cuda"))


def test_accepts_any_compiler_that_is_installed(monkeypatch, tmp_path):
    compiler = tmp_path / "compiler"
    compiler.touch(mode=0o755)
    monkeypatch.setenv("CXX", str(compiler))
    check_cpp_compiler(torch.device("cpu"))
