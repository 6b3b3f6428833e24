"""Replaces the head and the loss of Transformers language models with one chunked computation.

    whole      base ─▶ hidden ─▶ head ─▶ scores ─▶ loss_function(scores, labels)
    chunked    base ─▶ hidden ───────────────────▶ chunked_cross_entropy(hidden, labels, head)

The model's own `forward` runs in both cases. While it runs on labels in training, its head is
replaced with an identity, and its loss function computes the chunked loss. Nothing is assumed about
the model class. Instead, a trial in fp64 compares loss and gradients with the unchanged model. The
trial fails if a class transforms its scores (a soft cap, a scale) or adds other losses.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwise.errors import ModelError, UsageError
from shardwise.parallel.tensor.chunked_cross_entropy import chunked_cross_entropy

_WIDTH = 8
"""Number of features of a trial's hidden states."""

_TOLERANCE = 1e-9


class ChunkedLoss:
    """The chunked loss of `model`, a Transformers language model.

    Raises ModelError if the model's head is not an `nn.Linear`, or if the model fails the trial.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._head: nn.Module = model.get_output_embeddings()
        name = next((n for n, m in model._modules.items() if m is self._head), None)
        if type(self._head) is not nn.Linear or name is None:
            raise self._refusal(
                "get_output_embeddings() is not an nn.Linear that is an attribute of the model"
            )
        self._head_name = name
        self._forward_before = vars(model).get("forward")
        self._own_forward = model.forward
        with torch.random.fork_rng(devices=[]):  # a trial must not change the user's random numbers
            reason = self._try()
        if reason:
            raise self._refusal(reason)

    def _refusal(self, reason: str) -> ModelError:
        return ModelError(
            f"--chunked-loss does not support {type(self.model).__name__}: {reason}. Remove the "
            "flag, or write sw.chunked_cross_entropy(hidden, labels, head) in the model's forward."
        )

    def install(self) -> None:
        """Use the chunked loss in all training forward passes that have labels."""
        # An attribute of the object, not a hook: PEFT calls `model.forward` without its hooks.
        vars(self.model)["forward"] = self._forward

    def uninstall(self) -> None:
        """Restore the model's previous `forward`."""
        vars(self.model).pop("forward", None)
        if self._forward_before is not None:
            vars(self.model)["forward"] = self._forward_before

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        # Evaluation needs the scores.
        if kwargs.get("labels") is None or not (self.model.training and torch.is_grad_enabled()):
            return self._own_forward(*args, **kwargs)
        with _shadowed(self.model, {self._head_name: _identity, "_loss_function": self._loss}):
            output = self._own_forward(*args, **kwargs)
        if not isinstance(output, Mapping):
            raise UsageError(
                "--chunked-loss cannot leave the scores out of a tuple: call the model with "
                "return_dict=True, or remove --chunked-loss."
            )
        # These are hidden states. Leave them out, so that nobody takes them for scores.
        return type(output)(**{k: v for k, v in output.items() if k != "logits"})

    def _loss(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Compute the same loss as `transformers.loss.loss_utils.ForCausalLMLoss`.

        Args:
            logits: The input of the head, (..., tokens, features).
            labels: (..., tokens). The token at position n is compared with the label at n + 1.
            vocab_size: Unused. The head defines the number of classes.
            num_items_in_batch: Divisor of the summed losses, or None for the mean.
            ignore_index: Labels with this value are ignored.
            shift_labels: Labels that are already shifted, or None.
        """
        if shift_labels is None:
            assert labels is not None
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = chunked_cross_entropy(
            logits,
            shift_labels.to(logits.device).view(logits.shape[:-1]),
            self._head,
            ignore_index=ignore_index,
            reduction=reduction,
        )
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss if num_items_in_batch is None else loss / num_items_in_batch

    # -- the trial ------------------------------------------------------------------------

    def _try(self) -> str:
        """Compare both losses on random hidden states. Describe the difference, or return "".

        The model's parameters are not used, so they may be on the meta device.
        """
        assert isinstance(self._head, nn.Linear)
        draw = torch.Generator().manual_seed(0)
        classes, has_bias = self._head.out_features, self._head.bias is not None
        head = nn.Linear(_WIDTH, classes, bias=has_bias, dtype=torch.float64, device="cpu")
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.normal_(generator=draw)
        # Scores of about 10, so that soft caps and scales show.
        hidden = 4 * torch.randn(2, 6, _WIDTH, generator=draw, dtype=torch.float64)
        labels = torch.randint(classes, (2, 6), generator=draw)
        labels[0, :3] = -100
        for items in ({}, {"num_items_in_batch": torch.tensor(5)}):
            try:
                whole = self._trial_run(head, hidden, labels, items, chunked=False)
                chunked = self._trial_run(head, hidden, labels, items, chunked=True)
            except Exception as error:  # an unknown class may raise anything
                return f"a trial of its forward raised {type(error).__name__}: {error}"
            for a, b in zip(whole, chunked, strict=True):
                if not torch.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE):
                    return (
                        "in a trial, its loss was not the mean cross entropy of head(hidden) (it "
                        f"may scale or cap its scores): {whole[0]:.6g}, not {chunked[0]:.6g}"
                    )
        return ""

    def _trial_run(
        self,
        head: nn.Linear,
        hidden: Tensor,
        labels: Tensor,
        items: Mapping[str, Any],
        *,
        chunked: bool,
    ) -> list[Tensor]:
        """Return the loss, and the gradients of `hidden` and of the parameters of `head`.

        `head` is a small substitute for the model's head.
        """
        model, hidden = self.model, hidden.clone().requires_grad_()
        shadows: dict[str, Any] = {str(model.base_model_prefix): lambda *_, **__: _Outputs(hidden)}
        # In fp64, the conversion of scores to fp32 would hide differences.
        with _InFp64(), torch.enable_grad(), _shadowed(self, {"_head": head}):
            if chunked:
                shadows |= {self._head_name: _identity, "_loss_function": self._loss}
            else:
                shadows[self._head_name] = head
            with _shadowed(model, shadows):
                loss = self._own_forward(input_ids=labels.clamp(min=0), labels=labels, **items).loss
            return [loss.detach(), *torch.autograd.grad(loss, [hidden, *head.parameters()])]


def find(models: Sequence[nn.Module]) -> list[ChunkedLoss]:
    """Return a ChunkedLoss for each Transformers language model in `models`.

    Raises ModelError if there is none, or if one is not supported.
    """
    library = sys.modules.get("transformers")
    kind: Any = () if library is None else library.PreTrainedModel
    modules = dict.fromkeys(module for model in models for module in model.modules())
    found = [
        ChunkedLoss(module)
        for module in modules
        if isinstance(module, kind) and module.get_output_embeddings() is not None
    ]
    if not found:
        names = ", ".join(type(model).__name__ for model in models)
        raise ModelError(
            f"--chunked-loss found no language model of Transformers in {names}. In a model of "
            "your own, write sw.chunked_cross_entropy(hidden, target, head) instead of the head "
            "and the loss, and remove the flag."
        )
    return found


class _Outputs:
    """A base model's outputs in a trial. All fields except the hidden states are None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]


class _InFp64(TorchFunctionMode):
    """Makes `tensor.float()` return fp64."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        return func(*args, **(kwargs or {}))


def _identity(hidden: Tensor) -> Tensor:
    return hidden


@contextmanager
def _shadowed(owner: object, values: Mapping[Any, Any]) -> Iterator[None]:
    """Context manager that sets attributes on `owner`, which hide submodules of the same names.

    Python looks up an object's attributes before submodules. The submodules stay registered, but
    neither they nor their hooks run.
    """
    own = vars(owner)
    before = {name: own[name] for name in values if name in own}
    own.update(values)
    try:
        yield
    finally:
        for name in values:
            del own[name]
        own.update(before)
