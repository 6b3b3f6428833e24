"""The replacement of flash kernels in the table of Transformers, and the kernels of trials."""

from unittest import mock

import pytest
import torch

from shardwise.model.varlen_attention import attend
from shardwise.parallel.context import flash_attention


def test_the_reference_computes_on_the_device_of_its_inputs():
    query = torch.empty(1, 2, 8, 4, device="meta")  # operations with tensors of the CPU fail
    result, _ = attend(torch.nn.Identity(), query, query, query, sliding_window=3)
    assert result.device.type == "meta"


def test_the_kernel_is_restored_after_its_last_engine():
    transformers = pytest.importorskip("transformers")
    table, kernel = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS, "flash_attention_2"
    query = torch.randn(1, 2, 4, 4)
    wanted, _ = attend(torch.nn.Identity(), query, query, query)
    with mock.patch.dict(table._local_mapping, {kernel: attend}):
        older, newer = mock.Mock(), mock.Mock()
        flash_attention.install(kernel, older)
        flash_attention.install(kernel, newer)
        replaced = table[kernel]
        flash_attention.uninstall(kernel, older)
        flash_attention.uninstall(kernel, older)
        assert table[kernel] is replaced
        assert replaced is not attend
        # Outside of the models of engines, the kernel itself runs.
        torch.testing.assert_close(replaced(None, query, query, query, None)[0], wanted)
        flash_attention.uninstall(kernel, newer)
        assert table[kernel] is attend
