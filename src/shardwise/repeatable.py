"""Arithmetic whose bits do not change from run to run, nor with how many processes share a host."""

import os

import torch


def fix_arithmetic(device: torch.device) -> None:
    """Let this process compute in one order, for good.

    One thread, since kernels cut their work by the number of threads and sum accordingly. On a
    GPU torch's deterministic algorithms, which raise where an operation has none.
    """
    torch.set_num_threads(1)
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is loaded
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = False
