"""Implements PipelineEngine, which trains a PipelineModule with one complete update per call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DistributedSampler

import shardwise as sw
from shardwise.deepspeed.engine import DeepSpeedEngine
from shardwise.deepspeed.loader import RepeatingLoader
from shardwise.deepspeed.pipe.module import PipelineModule
from shardwise.deepspeed.pipe.topology import PipelineParallelGrid
from shardwise.errors import UsageError
from shardwise.layout import fingerprints

Batches = Iterator[Any]


class PipelineEngine(DeepSpeedEngine):
    """The engine of a PipelineModule. Created by `deepspeed.initialize`.

    `train_batch` reads `gradient_accumulation_steps` batches, which are pairs of inputs and labels,
    and updates the parameters once. All ranks of a pipeline must read the same batches, including
    those in the middle stages.

    Example:
        ```python
        engine, *_ = deepspeed.initialize(model=pipeline_module, config="ds.json")
        for _ in range(steps):
            loss = engine.train_batch(batches)
        ```
    """

    module: PipelineModule

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        if self.world.settings.microbatches not in (None, self.gradient_accumulation_steps()):
            raise UsageError(
                f"--microbatches {self.world.settings.microbatches} contradicts "
                f"gradient_accumulation_steps {self.gradient_accumulation_steps()}, which sets the "
                "micro-batches of a PipelineModule. Leave the flag out."
            )
        interval = self._job.document.get("pipeline.activation_checkpoint_interval", 0)
        if interval:
            self.module.set_checkpoint_interval(interval)
        self.grid = PipelineParallelGrid(self.world)
        self.num_stages, self.stage_id = self.module.num_stages, self.module.stage_id
        self.agg_train_loss: Tensor | None = None
        self._data: Batches | None = None
        # Compare only the first batches. A wrong sampler is detected there, and a collective in
        # every update would take time.
        self._compared = self.world.mesh.replica == 1
        self._batch_fn: Callable[[Any], Any] | None = None

    # -- batches ----------------------------------------------------------------------------

    @property
    def micro_batches(self) -> int:
        """Number of batches per update."""
        return self.gradient_accumulation_steps()

    def read(self, dataset: Any) -> Any:
        """Create a loader for `train_batch` calls without an iterator, and return it.

        The loader repeats the dataset in its own order.

        Args:
            dataset: A map-style dataset of pairs of inputs and labels.
        """
        sampler: Any = DistributedSampler(
            dataset, self.world.data_size, self.world.data_rank, shuffle=False
        )
        loader = RepeatingLoader(self.deepspeed_io(dataset, data_sampler=sampler))
        self.set_dataloader(loader)
        return loader

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """Set the loader for `train_batch` calls without an iterator."""
        self._data = iter(loader)

    def set_dataiterator(self, iterator: Batches) -> None:
        """Set the iterator for `train_batch` calls without one."""
        self._data = iterator

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Set a function that converts a loader's batches into pairs of inputs and labels."""
        self._batch_fn = fn

    def reset_activation_shape(self) -> None:
        """No-op, because shapes may change from batch to batch."""

    def _batch(self, source: Batches | None, call: str) -> tuple[Any, Any]:
        """Return the next pair of inputs and labels, on this rank's device."""
        if source is None:
            raise UsageError(
                f"engine.{call} has no batches on worker {self.world.rank}. Pass the iterator on "
                "every worker of a pipeline, or pass training_data to deepspeed.initialize."
            )
        batch = next(source)
        if self._batch_fn is not None:
            batch = self._batch_fn(batch)
        if not isinstance(batch, list | tuple) or len(batch) != 2:
            raise UsageError(
                f"engine.{call} needs batches that are pairs of inputs and labels, not a "
                f"{type(batch).__name__}. Convert them with engine.set_batch_fn."
            )
        inputs, labels = pytree.tree_map_only(Tensor, lambda x: x.to(self.device), batch)
        # Loaders convert tuples to lists, but layers expect several inputs as a tuple.
        return tuple(inputs) if isinstance(inputs, list) else inputs, labels

    # -- training and evaluation ------------------------------------------------------------

    def train_batch(self, data_iter: Batches | None = None) -> Tensor:
        """Train on the next batches and update the parameters. Collective.

        Args:
            data_iter: An iterator over pairs of inputs and labels, the same on all ranks of a
                pipeline (default: the loader of `training_data`).

        Returns:
            The mean loss across all ranks: a scalar tensor in fp32.

        Raises:
            UsageError: If ranks of a pipeline have different batches. Only the first call checks
                this.
        """
        engine = self._engine("train_batch")
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        self.module.train()
        count = self.gradient_accumulation_steps()
        batches = [self._batch(self._data, "train_batch") for _ in range(count)]
        if not self._compared:
            _check_same(self.world, batches)
            self._compared = True
        reduction = "ddp" if self._job.averages else "sum"

        def loss(inputs: Any, labels: Any) -> Any:
            return self.module.loss_of(inputs, labels) / count

        # `cut=False`, because the batches are already micro-batches. The loss is divided by their
        # number, because the engine sums the gradients of micro-batches.
        engine.forward_backward(loss, *batches, reduction=reduction, cut=False)
        stats = engine.step(self._job.clipping or None)
        self._grad_norm, self.losses = stats.grad_norm, stats.loss
        self._step_applied = not stats.skipped
        self._counts.micro_steps += count
        self._unmanaged_backwards = count
        self._follow({})
        self.agg_train_loss = torch.tensor(stats.loss, dtype=torch.float32, device=self.device)
        return self.agg_train_loss

    @torch.no_grad()
    def eval_batch(
        self,
        data_iter: Batches,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Return the mean loss of the next batches, in evaluation mode. Collective.

        Args:
            data_iter: An iterator over pairs of inputs and labels, the same on all ranks of a
                pipeline.
            return_logits: Whether to return the outputs of the last batch too.
            compute_loss: Whether to compute losses. If False, the outputs are averaged instead.
            reduce_output: "avg", or None for a list with each batch's value.
            bcast_loss: Ignored, because all ranks get the result.
            num_micro_batches: Number of batches (default: `gradient_accumulation_steps`).

        Returns:
            The mean over all batches and ranks. With `return_logits`, a pair of this mean and the
            outputs.

        Raises:
            UsageError: If `reduce_output` has any other value.
        """
        del bcast_loss
        self.module.eval()
        count = num_micro_batches or self.gradient_accumulation_steps()
        values, outputs = [], None
        for _ in range(count):
            inputs, labels = self._batch(data_iter, "eval_batch")
            outputs = found = self.module(inputs)
            if compute_loss and self.module.loss_fn is not None:
                found = self.module.loss_fn(outputs, labels)
            values.append(self._whole(found))
        result = values if reduce_output is None else self._mean(values, reduce_output)
        return (result, self._whole(outputs)) if return_logits else result

    def _whole(self, found: Any) -> Any:
        """Copy a stage's output `found` to every rank of its pipeline. Collective."""
        return pytree.tree_map_only(Tensor, lambda x: x.cpu().to(self.device), found)

    def _mean(self, values: list[Any], reduce_output: str) -> Any:
        if reduce_output.lower() != "avg":
            raise UsageError(f"reduce_output must be avg or None, not {reduce_output!r}.")
        leaves = [pytree.tree_leaves(value) for value in values]
        shape = pytree.tree_structure(values[0])
        mean = [torch.stack(each).mean(0) for each in zip(*leaves, strict=True)]
        over_all = [self.world.sum(each) / self.world.size for each in mean]
        return pytree.tree_unflatten(over_all, shape)

    # -- calls that a plain engine supports ---------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> NoReturn:
        """Raise UsageError, because the stages process different micro-batches at the same time."""
        raise _of_batches("forward")

    def backward(self, *inputs: Any, **kwargs: Any) -> NoReturn:
        """Raise UsageError, because the stages process different micro-batches at the same time."""
        raise _of_batches("backward")

    def step(self, *inputs: Any, **kwargs: Any) -> NoReturn:
        """Raise UsageError, because the stages process different micro-batches at the same time."""
        raise _of_batches("step")

    def is_first_stage(self) -> bool:
        """Return whether this rank runs the first stage."""
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        """Return whether this rank runs the last stage."""
        return self.stage_id == self.num_stages - 1


def _of_batches(call: str) -> UsageError:
    return UsageError(
        f"engine.{call}() does not work with a PipelineModule, because its stages run different "
        "micro-batches at a time. Write engine.train_batch(data_iter) or "
        "engine.eval_batch(data_iter)."
    )


def _check_same(world: sw.World, batches: Sequence[Any]) -> None:
    """Raise UsageError on all ranks if a replica's ranks have different `batches`. Collective."""
    found = world.gather([_described(leaf) for leaf in pytree.tree_leaves(list(batches))])
    for rank, tensors in enumerate(found):
        first = rank - rank % world.mesh.replica
        if tensors != found[first]:
            raise UsageError(
                f"engine.train_batch has different batches on worker {rank} than on worker "
                f"{first} of the same pipeline. All {world.mesh.replica} workers of a pipeline "
                "need the same batches. Create the sampler with "
                "num_replicas=engine.world.data_size and rank=engine.world.data_rank, and draw "
                "no augmentation that differs between workers; or pass training_data to "
                "deepspeed.initialize."
            )


def _described(leaf: Any) -> tuple[Any, ...]:
    """Return a value that ranks can compare instead of `leaf`: for a tensor, a fingerprint."""
    if not isinstance(leaf, Tensor):
        return (type(leaf).__name__,)
    form = (str(leaf.dtype), tuple(leaf.shape))
    if not fingerprints.can_be_taken(leaf):
        return form
    taken = fingerprints.of(leaf)
    return (*form, taken.bits, taken.placed)
