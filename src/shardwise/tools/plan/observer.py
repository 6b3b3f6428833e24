"""Runs a script with an engine that observes its first step, for `shardwise plan`.

    python -m shardwise.tools.plan.observer FILE SAMPLES TENSOR CONTEXT METHOD SPREAD FUSED SCRIPT
        ...

SAMPLES overrides the batch size of the script's Loaders (0 keeps the script's own). TENSOR and
CONTEXT are the numbers of tensor-parallel and context-parallel ranks, and METHOD is the
--context-method. SPREAD is 1 if experts are spread over tensor-parallel ranks, and otherwise 0.
FUSED is 1 if the devices of the plan have CUDA's kernels, which save fewer tensors than the CPU's,
and otherwise 0. The script's data, loaders and model code run unchanged. `sw.Engine` frees the
parameters' storage. At the end of the first step, the record is written to FILE and the script
exits.
"""

from __future__ import annotations

import json
import runpy
import sys
import traceback
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise.data.loader import Loader
from shardwise.errors import ShardwiseError, UsageError
from shardwise.launch import program
from shardwise.tiers.host_memory import MAPPED
from shardwise.tools.plan.observation import Observation, finish
from shardwise.tools.plan.observed_engine import ObservedEngine
from shardwise.tools.plan.step_recorder import user_place
from shardwise.world.world import World, has_joined


def main(arguments: list[str]) -> None:
    """Observe a script. `arguments` is the command line described in the module docstring."""
    path, samples, tensor, context, method, spread, fused, *words = arguments
    observation = Observation.begin(
        Path(path), int(tensor), int(context), method, spread=spread == "1"
    )
    # Replace Engine before the script runs, so that the script imports the replacement. The
    # integrations with other libraries import it from these three modules.
    for name in ("shardwise.engine", "shardwise.engine.engine", "shardwise.engine.engines"):
        import_module(name).Engine = ObservedEngine  # type: ignore[attr-defined]
    _replace_loader(observation, int(samples))
    skip_initial_values()
    if fused == "1":
        _leave_out_attention_dropout()
        _fuse_rms_norm()
        observation.recorder.on_cuda = True
    if observation.context > 1:
        _split_sequences(observation.context)
    register_optimizer_step_pre_hook(_refuse_plain_step)
    try:
        if program.set_up_python(words):  # a module, with -m
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit:
        if observation.written:
            raise
        _fail(observation, "The script ended before its first step of an sw.Engine.", "")
    # Ctrl-C stops the plan, and is not an error of the script.
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        traceback.print_exc()
        kind = "" if isinstance(error, ShardwiseError) else f"{type(error).__name__}: "
        advice = _FLEX if _is_of_flex_attention(error) else ""
        _fail(observation, f"{kind}{error}{advice}", user_place(error.__traceback__))
    if not observation.written:
        # A script can end without calling engine.step(). Use its backward passes if there are any.
        if any(engine.backwards for engine in observation.engines):
            finish(observation)
        _fail(observation, "The script made no step of an sw.Engine.", "")


_FLEX = (
    " The plan runs the script on a CPU. Plan with scaled_dot_product_attention "
    '(attn_implementation="sdpa" for models of Transformers), whose tensors have the same shapes.'
)


def _is_of_flex_attention(error: BaseException) -> bool:
    """Return whether flex attention has raised `error`. It has no backward pass on a CPU."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    module = "" if frame is None else str(frame.tb_frame.f_globals.get("__name__", ""))
    # Where it has one, the plan cannot observe it either, and the message names it.
    return isinstance(error, NotImplementedError) and "flex_attention" in f"{module} {error}"


def _refuse_plain_step(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raise UsageError at the first optimizer step of a script that does not use Shardwise."""
    del args, kwargs
    # Otherwise the script would train to its end before it is refused.
    if not has_joined():
        raise UsageError(
            f"{type(optimizer).__name__}.step() is called without an sw.Engine. docs/from_ddp.md "
            "shows the lines to change in a script of plain PyTorch"
        )


def _leave_out_attention_dropout() -> None:
    """Make `scaled_dot_product_attention` ignore its dropout.

    The CPU computes attention with dropout from all scores, which CUDA's fused kernels never store.
    Without dropout, the CPU has a fused kernel too, with the same inputs and outputs as CUDA's.
    """
    attention = functional.scaled_dot_product_attention

    def fused(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        *args: Any,
        **options: Any,
    ) -> Tensor:
        del dropout_p
        return attention(query, key, value, attn_mask, 0.0, *args, **options)

    functional.scaled_dot_product_attention = fused


def _fuse_rms_norm() -> None:
    """Replace `torch.rms_norm` with an operator that saves the same tensors as CUDA's kernel.

    The CPU computes RMSNorm with separate operators, whose intermediate results are saved for the
    backward pass. CUDA's fused kernel saves its input, and one fp32 number per row. It is the
    kernel of layer norm without the mean, so layer norm has the same inputs and outputs.
    """

    def fused(
        input: Tensor,
        normalized_shape: list[int],
        weight: Tensor | None = None,
        eps: float | None = None,
    ) -> Tensor:
        epsilon = torch.finfo(input.dtype).eps if eps is None else eps
        return functional.layer_norm(input, normalized_shape, weight, None, epsilon)

    torch.rms_norm = functional.rms_norm = fused  # type: ignore[assignment]


def _replace_loader(observation: Observation, samples: int) -> None:
    """Replace Loader with a class whose batch size is `samples`, unless `samples` is 0.

    The class also records the script's own batch size, and whether the script's loop can
    accumulate micro-batches.
    """

    class ObservedLoader(Loader):
        def __init__(self, dataset: Any, batch_size: int | None = None, **options: Any) -> None:
            self.script_batch_size = batch_size
            super().__init__(dataset, samples or batch_size if batch_size else None, **options)

        def __iter__(self) -> Any:
            observation.script_batch_size = self.script_batch_size or 0
            return super().__iter__()

        def steps(self) -> Any:
            observation.script_batch_size, observation.accumulates = (
                self.script_batch_size or 0,
                True,
            )
            return super().steps()

    import_module("shardwise.data.loader").Loader = ObservedLoader  # type: ignore[attr-defined]


def _split_sequences(context: int) -> None:
    """Make the Loader and `world.share` return the first of `context` parts of every sequence."""
    # The mesh keeps one rank, because the other ranks of the context group do not exist.
    World.context_size = property(lambda world: context)  # type: ignore[assignment]
    World.context_rank = property(lambda world: 0)  # type: ignore[assignment]


@cache
def skip_initial_values() -> None:
    """Make the functions of torch.nn.init leave large tensors untouched.

    Memory that is never written uses no RAM, so the model may be larger than this machine's RAM.
    Must be called before packages that import these functions by name.
    """
    # Large tensors get their own memory mapping, which reads as zeros until it is written. Small
    # tensors are still initialised, because they reuse freed memory with arbitrary content, and the
    # test of a tensor-parallel split computes with their values.

    def skipping(function: Callable[..., Any]) -> Callable[..., Any]:
        def unchanged(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            large = tensor.numel() * tensor.element_size() >= MAPPED
            return tensor if large else function(tensor, *args, **kwargs)

        return unchanged

    for name in (
        *("uniform_", "normal_", "trunc_normal_", "constant_", "ones_", "zeros_", "eye_"),
        *("dirac_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_"),
        *("orthogonal_", "sparse_"),
    ):
        setattr(nn.init, name, skipping(getattr(nn.init, name)))


def _fail(observation: Observation, why: str, line: str) -> None:
    """Write to a file why nothing was observed, and exit."""
    observation.path.with_suffix(".error").write_text(json.dumps({"why": why, "line": line}))
    raise SystemExit(3)


if __name__ == "__main__":
    import_module("shardwise.tools.plan.observer").main(sys.argv[1:])
