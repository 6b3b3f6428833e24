"""Converts a DeepSpeed config to settings of a run and options of a training loop."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwise.config.deepspeed.batches import MICRO, STEPS, TOTAL, Batches, solve
from shardwise.config.deepspeed.document import Document, check, read
from shardwise.errors import ConfigError

SCHEDULES = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
OPTIMIZERS = ("Adam", "AdamW", "Adagrad", "Muon")
"""Optimizers whose names are not case-sensitive in DeepSpeed.

Any other name is a torch optimizer.
"""
_ELSEWHERE = ("onebitadam", "zerooneadam", "onebitlamb", "lamb", "lion", "muadam", "muadamw")
_MISSING = (*_ELSEWHERE, "musgd")


@dataclass(frozen=True)
class LossScaling:
    """Loss-scaling options for fp16.

    Args:
        static: The static factor, or 0 for dynamic scaling.
        power: The initial dynamic scale is 2**power.
        window: The dynamic scale doubles after this many steps without overflow.
    """

    static: float = 0.0
    power: int = 16
    window: int = 1000


@dataclass(frozen=True)
class Monitor:
    """Options of a monitor, which writes training metrics to the folder `folder`/`job`."""

    folder: str = ""
    job: str = "DeepSpeedJobName"


@dataclass(frozen=True)
class Named:
    """The name of an optimizer or a schedule, and its keyword arguments."""

    name: str
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DeepSpeedJob:
    """The parsed content of a DeepSpeed config. `document` holds its raw keys."""

    document: Document
    settings: Mapping[str, Any]
    """The Shardwise settings that the config sets."""
    source_keys: Mapping[str, str]
    """Maps each setting to the config key that sets it."""
    stage: int
    precision: str
    clipping: float
    """The maximum gradient norm. 0 turns clipping off."""
    averages: bool
    """True if gradients are averaged over the workers, False if they are summed."""
    manages_accumulation: bool
    optimizer: Named | None
    schedule: Named | None
    scaling: LossScaling
    steps_per_print: int | None
    drop_last: bool
    tensorboard: Monitor | None
    csv: Monitor | None
    tag_validation: str
    """What save_checkpoint does if tags differ between ranks: "warn", "ignore" or "fail"."""

    def batches(self, workers: int) -> Batches:
        """Return the batch sizes for `workers` data-parallel workers.

        Raises ConfigError if the batch sizes contradict each other.
        """
        total, micro, steps = (self.document.get(key) for key in (TOTAL, MICRO, STEPS))
        return solve(total, micro, steps, workers, self.document.name)


def parse(
    source: str | os.PathLike[str] | Mapping[str, Any], auto: Mapping[str, Any] | None = None
) -> DeepSpeedJob:
    """Parse the DeepSpeed config `source`, a file name or a dict.

    Args:
        source: The config.
        auto: Values to use for keys that are set to "auto", by dotted name.

    Raises:
        ConfigError: The JSON is invalid, a key is unknown to DeepSpeed or not supported by
            Shardwise, or keys contradict each other.
    """
    tree, name = read(source)
    document = check(tree, name, auto or {})
    _refuse_contradictions(document)
    rows = [*_placement_rows(document), *_precision_rows(document), *_transport_rows(document)]
    settings = {name: value for name, value, _ in rows}
    return DeepSpeedJob(
        document=document,
        settings=settings,
        source_keys={name: key for name, _, key in rows},
        stage=document.get("zero_optimization.stage", 0),
        precision=settings.get("precision", "fp32"),
        clipping=float(document.get("gradient_clipping", 1.0)),
        averages=document.get("gradient_allreduce_op", "mean").lower() == "mean",
        manages_accumulation=document.get("managed_gradient_accumulation", True),
        optimizer=_optimizer(document),
        schedule=_named(document, "scheduler"),
        scaling=LossScaling(
            document.get("fp16.loss_scale", 0.0),
            document.get("fp16.initial_scale_power", 16),
            document.get("fp16.loss_scale_window", 1000),
        ),
        steps_per_print=document.get("steps_per_print"),
        drop_last=document.get("dataloader_drop_last", False),
        tensorboard=_monitor(document, "tensorboard"),
        csv=_monitor(document, "csv_monitor"),
        tag_validation=_tag_validation(document),
    )


# -- unsupported values and contradictions --------------------------------------------------------


def _refuse_contradictions(document: Document) -> None:
    stage = document.get("zero_optimization.stage", 0)
    if stage not in (0, 1, 2, 3):
        raise document.error("zero_optimization.stage", f"takes 0, 1, 2 or 3, not {stage}.")
    _refuse_precisions(document)
    operation = document.get("gradient_allreduce_op", "mean").lower()
    if operation not in ("mean", "sum"):
        raise document.error("gradient_allreduce_op", f"takes mean or sum, not {operation!r}.")
    if operation == "sum" and stage == 3:
        raise _both(document, "gradient_allreduce_op sum", "zero_optimization.stage 3")
    if document.get("gradient_clipping", 1.0) < 0:
        raise document.error("gradient_clipping", "takes a number of 0 or more; 0 turns it off.")
    if document.get("sequence_parallel_size", 1) > 1:
        raise document.error("sequence_parallel_size", "is not supported: leave it out.")
    device = document.get("zero_optimization.offload_param.device", "none")
    if stage != 3 and (device != "none" or document.get("zero_optimization.cpu_offload_param")):
        raise _both(document, "zero_optimization.offload_param", f"zero_optimization.stage {stage}")
    for state in ("param", "optimizer"):
        _refuse_old_and_new(document, state)


def _refuse_precisions(document: Document) -> None:
    wanted = ("bf16.enabled", "fp16.enabled", "torch_autocast.enabled")
    on = [key for key in wanted if document.get(key)]
    if len(on) > 1:
        raise _both(document, on[0], on[1])
    dtype = document.get("torch_autocast.dtype", "bfloat16")
    if dtype not in _AUTOCAST:
        raise document.error("torch_autocast.dtype", f"takes bfloat16 or float16, not {dtype!r}.")
    power, window = (
        document.get(f"fp16.{n}", 1) for n in ("initial_scale_power", "loss_scale_window")
    )
    if document.get("fp16.loss_scale", 0) < 0 or power < 0 or window < 1:
        raise document.error(
            "fp16",
            "takes a loss_scale and an initial_scale_power of 0 or more, and a window above 0.",
        )


def _refuse_old_and_new(document: Document, state: str) -> None:
    """Raise ConfigError if the old and the new key for offloading `state` contradict each other."""
    old = "zero_optimization.cpu_offload" + ("_param" if state == "param" else "")
    section = f"zero_optimization.offload_{state}"
    new = f"{section}.device"
    if document.get(old) and document.get(new, "cpu") != "cpu":
        raise _both(document, old, f"{new} {document.get(new)}")
    if document.get(new, "none") not in ("none", "cpu", "nvme"):
        raise document.error(new, f"takes none, cpu or nvme, not {document.get(new)!r}.")
    if document.get(new) == "nvme" and not document.get(
        f"zero_optimization.offload_{state}.nvme_path"
    ):
        raise document.error(
            new, f"nvme needs zero_optimization.offload_{state}.nvme_path, a folder."
        )


def _both(document: Document, one: str, other: str) -> ConfigError:
    return ConfigError(
        f"{document.name}: {one} cannot be combined with {other}: leave one of them out."
    )


# -- settings and options -------------------------------------------------------------------------

_AUTOCAST = {
    "bfloat16": "bf16-mixed",
    "bf16": "bf16-mixed",
    "torch.bfloat16": "bf16-mixed",
    "float16": "fp16-mixed",
    "fp16": "fp16-mixed",
    "half": "fp16-mixed",
    "torch.float16": "fp16-mixed",
}


Row = tuple[str, Any, str]
"""A setting, its value, and the config key that sets it."""


def _placement_rows(document: Document) -> Iterator[Row]:
    stage = "zero_optimization.stage"
    if stage in document.values:
        yield "zero", document.get(stage), stage
    for state, name in (("optimizer", "offload_optimizer"), ("param", "offload_params")):
        key, tier = _tier(document, state)
        if tier is not None:
            yield name, tier, key
    # ZeRO++ (hpZ) partitions a second copy of the weights within each host, so that gathers stay
    # inside the host.
    if document.get(key := "zero_optimization.zero_hpz_partition_size", 1) > 1:
        yield "shard_within", "host", key
    if document.get(key := "activation_checkpointing.cpu_checkpointing"):
        yield "offload_activations", "cpu", key
    if (size := document.get(key := "tensor_parallel.autotp_size", 0)) > 1:
        yield "tensor", size, key
    if (micro := document.get(MICRO)) is not None:
        yield "micro_batch_size", micro, MICRO


def _precision_rows(document: Document) -> Iterator[Row]:
    if document.get(key := "bf16.enabled"):
        yield "precision", "bf16", key
        # By default, DeepSpeed skips a step with non-finite gradients, whereas we stop the run.
        if document.get(checks := "bf16.check_grad_overflow", True):
            yield "nonfinite", "skip", checks if checks in document.values else key
    elif document.get(key := "fp16.enabled"):
        yield "precision", "fp16-mixed", key
    elif document.get(key := "torch_autocast.enabled"):
        yield "precision", _AUTOCAST[document.get("torch_autocast.dtype", "bfloat16")], key


def _transport_rows(document: Document) -> Iterator[Row]:
    # DeepSpeed counts elements of the parameters' dtype, --bucket-mb counts MiB.
    if elements := document.get(key := "zero_optimization.reduce_bucket_size"):
        yield "bucket_mb", elements * (2 if document.get("bf16.enabled") else 4) / 2**20, key
    if document.get(key := "zero_optimization.overlap_comm") is False:
        yield "overlap", False, key


def _tier(document: Document, state: str) -> tuple[str, str | None]:
    """Return the config key that sets the tier of `state`, and the tier, which may be None."""
    section = f"zero_optimization.offload_{state}"
    device = document.get(f"{section}.device", "none")
    old = "zero_optimization.cpu_offload" + ("_param" if state == "param" else "")
    if device == "none":
        return old, "cpu" if document.get(old) else None
    if device == "nvme":
        return f"{section}.device", f"nvme:{document.get(f'{section}.nvme_path')}"
    return f"{section}.device", "cpu"


def _named(document: Document, section: str) -> Named | None:
    name = document.get(f"{section}.type")
    if name is None:
        return None
    if not isinstance(name, str):
        raise document.error(f"{section}.type", f"takes a name, not {name!r}.")
    return Named(name, dict(document.get(f"{section}.params", {})))


def _optimizer(document: Document) -> Named | None:
    found = _named(document, "optimizer")
    if found is None:
        return None
    known = {name.lower(): name for name in OPTIMIZERS}
    if found.name.lower() in _MISSING:
        raise document.error(
            "optimizer.type",
            f"{found.name} is not supported: take one of {', '.join(OPTIMIZERS)}, or pass your own "
            "optimizer to initialize.",
        )
    if "max_grad_norm" in found.params:
        raise document.error(
            "optimizer.params.max_grad_norm", "is not supported: write gradient_clipping instead."
        )
    return Named(known.get(found.name.lower(), found.name), found.params)


def _tag_validation(document: Document) -> str:
    key = "checkpoint.tag_validation"
    given = document.get(key, "warn")
    if given.lower() not in ("warn", "ignore", "fail"):
        raise document.error(key, f"takes Warn, Ignore or Fail, not {given!r}.")
    return str(given.lower())


def _monitor(document: Document, section: str) -> Monitor | None:
    if not document.get(f"{section}.enabled"):
        return None
    folder, job = (document.get(f"{section}.{name}") for name in ("output_path", "job_name"))
    return Monitor(folder or "", job or Monitor.job)
