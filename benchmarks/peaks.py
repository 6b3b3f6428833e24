"""What a device's arithmetic can do at most, and what a step asks of it: for the share that is used
(MFU, model FLOPs utilisation: Chowdhery et al. 2022, arXiv:2204.02311)."""

from __future__ import annotations

from dataclasses import dataclass

from workloads import Workload


@dataclass(frozen=True, kw_only=True)
class Peak:
    """TFLOP/s of a GPU by arithmetic, without sparsity, by its vendor."""

    bf16: float
    tf32: float
    fp32: float
    source: str

    def of(self, precision: str) -> float:
        """TFLOP/s of one of `workloads.PRECISIONS`."""
        return {"fp32": self.fp32, "tf32": self.tf32}.get(precision, self.bf16)


_HOPPER = "NVIDIA H100 Tensor Core GPU Architecture (whitepaper)"
_H100_SXM = {"bf16": 989.4, "tf32": 494.7, "fp32": 66.9}

PEAKS = {
    "NVIDIA H100 80GB HBM3": Peak(**_H100_SXM, source=f"{_HOPPER}, SXM5"),
    "NVIDIA H100 PCIe": Peak(bf16=756.0, tf32=378.0, fp32=51.2, source=f"{_HOPPER}, PCIe"),
    "NVIDIA H100 NVL": Peak(bf16=835.5, tf32=417.5, fp32=60.0, source="NVIDIA H100 NVL datasheet"),
    "NVIDIA H200": Peak(**_H100_SXM, source="NVIDIA H200 datasheet (SXM): the H100's arithmetic"),
    "NVIDIA A100-SXM4-80GB": Peak(
        bf16=312.0, tf32=156.0, fp32=19.5, source="NVIDIA A100 datasheet (SXM)"
    ),
    "NVIDIA A100-SXM4-40GB": Peak(
        bf16=312.0, tf32=156.0, fp32=19.5, source="NVIDIA A100 datasheet (SXM)"
    ),
    "NVIDIA A100 80GB PCIe": Peak(
        bf16=312.0, tf32=156.0, fp32=19.5, source="NVIDIA A100 datasheet (PCIe)"
    ),
}
"""By the name that torch.cuda.get_device_name gives. One that is not here has no MFU."""


def mfu(flops: int, ms: float | None, device: str, precision: str) -> float | None:
    """The share of what `device` can do that a step of `flops` in `ms` has used; None: unknown."""
    peak = PEAKS.get(device)
    return flops / (ms / 1e3) / (1e12 * peak.of(precision)) if peak and ms else None


def flops(workload: Workload) -> int:
    """Of a forward and backward on the whole batch, as torch's counter has them: of matrix products
    and convolutions (attention in whole, though half of it is masked), without the update."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    import models

    with torch.device("meta"):  # shapes only: no memory, no time
        model = models.build(workload)
    inputs, targets = (part.to("meta") for part in models.batches(workload, 0, 1)[0])
    with FlopCounterMode(display=False) as counter:
        models.loss_of(model, inputs, targets).backward()
    return counter.get_total_flops()
