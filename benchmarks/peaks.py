"""The peak arithmetic of devices and the FLOPs of a step, for the share that a step uses.

MFU, model FLOPs utilisation: Chowdhery et al. 2022, arXiv:2204.02311.
"""

from workloads import Workload

_HOPPER = "NVIDIA H100 Tensor Core GPU Architecture (whitepaper)"
_A100 = {"bf16": 312.0, "tf32": 156.0, "fp32": 19.5}
_H100_SXM = {"bf16": 989.4, "tf32": 494.7, "fp32": 66.9}

PEAKS = {
    "NVIDIA H100 80GB HBM3": (_H100_SXM, f"{_HOPPER}, SXM5"),
    "NVIDIA H100 PCIe": ({"bf16": 756.0, "tf32": 378.0, "fp32": 51.2}, f"{_HOPPER}, PCIe"),
    "NVIDIA H100 NVL": ({"bf16": 835.5, "tf32": 417.5, "fp32": 60.0}, "NVIDIA H100 NVL datasheet"),
    "NVIDIA H200": (_H100_SXM, "NVIDIA H200 datasheet (SXM): the H100's arithmetic"),
    "NVIDIA A100-SXM4-80GB": (_A100, "NVIDIA A100 datasheet (SXM)"),
    "NVIDIA A100-SXM4-40GB": (_A100, "NVIDIA A100 datasheet (SXM)"),
    "NVIDIA A100 80GB PCIe": (_A100, "NVIDIA A100 datasheet (PCIe)"),
}
"""TFLOP/s without sparsity by the vendor, and the source, by torch.cuda.get_device_name's name. A
device that is not here has no MFU."""


def mfu(flops: int, ms: float | None, device: str, precision: str) -> float | None:
    """Return the share of the peak of `device` that a step of `flops` in `ms` used, if known."""
    if device not in PEAKS or not ms:
        return None
    by_precision, _ = PEAKS[device]
    return flops / (ms / 1e3) / (1e12 * by_precision.get(precision, by_precision["bf16"]))


def flops(workload: Workload) -> int:
    """Return the FLOPs of a forward and backward on the whole batch by torch's counter: of matrix
    products and convolutions (attention in whole, though half of it is masked), without the update.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    import models

    with torch.device("meta"):  # shapes only: no memory, no time
        model = models.build(workload)
    inputs, targets = (part.to("meta") for part in models.batches(workload, 0, 1)[0])
    with FlopCounterMode(display=False) as counter:
        models.loss_of(model, inputs, targets).backward()
    return counter.get_total_flops()
