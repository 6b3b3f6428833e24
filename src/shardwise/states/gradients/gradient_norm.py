"""Clips gradients by their global norm.

A rank squares the gradient sums of its intervals, bucket by bucket as they arrive
(`states/storage/squared_sums.py`). `engine/exchange.py` adds the squares of all ranks, and of all
pipeline stages. The update multiplies gradients by `clip_coefficient`, together with the one
division of the step.

    bucket's sum ─▶ square_span ─┐
    bucket's sum ─▶ square_span ─┼─▶ exchange over ranks ─▶ sqrt ─▶ clip_coefficient
    ...                          ┘
"""


def clip_coefficient(norm: float, max_norm: float | None) -> float:
    """Return the factor that clips gradients of global 2-norm `norm` to `max_norm`.

    Without a `max_norm` it is 1. torch.nn.utils.clip_grad_norm_ uses the same formula.
    """
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
