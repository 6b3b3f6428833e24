"""Seeds and deterministic arithmetic, for reproducible runs.

A seed is a 32-bit hash of coordinates such as the run's seed, the engine, the step and the rank. It
has 32 bits because torch's CPU generator uses no more.
"""

import hashlib
import os
import random
import sys
from typing import Any

import torch


def seed_from(*coordinates: int | str) -> int:
    """Return a 32-bit seed: the BLAKE2b hash of `coordinates`."""
    # Join with a separator that occurs in no coordinate, because ("a", "bc") and ("ab", "c") must
    # give different seeds. Don't use `hash`, which Python salts differently in every process.
    text = "\x1f".join(str(coordinate) for coordinate in coordinates)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


def seed_everything(seed: int) -> None:
    """Seed torch (all devices), random and, if it is imported, numpy."""
    # Without an accelerator, torch.manual_seed would record a stack trace for each device type that
    # might appear.
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    seed_cpu(seed)


def seed_cpu(seed: int) -> None:
    """Seed the CPU generators of torch and `random`, and NumPy's if NumPy is loaded."""
    # Not torch.manual_seed, which also seeds every accelerator, because this runs once per sample.
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)  # numpy rejects larger seeds


def generator_of(device: torch.device) -> torch.Generator:
    """Return torch's default generator of `device`, a CPU or accelerator."""
    if device.type == "cpu":
        return torch.default_generator
    module: Any = torch.get_device_module(device)
    if device.type == "mps":  # a single device, with a separate function for its generator
        return module._get_default_mps_generator()  # type: ignore[no-any-return]
    module.init()
    index = module.current_device() if device.index is None else device.index
    return module.default_generators[index]  # type: ignore[no-any-return]


def fix_arithmetic(device: torch.device) -> None:
    """Make arithmetic in this process deterministic until it exits.

    On a GPU, this enables torch's deterministic algorithms. Operations that have none raise an
    error.
    """
    # Use one thread: kernels split sums by the number of threads, which changes the rounding.
    torch.set_num_threads(1)
    if device.type != "cpu":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is loaded
        torch.use_deterministic_algorithms(True)
        # By default this mode fills new memory with NaN, which costs a pass over every buffer.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = False
