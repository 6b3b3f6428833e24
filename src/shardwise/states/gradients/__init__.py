"""Collects gradients in buckets during the backward pass, and reduces them across ranks.

gradients.py          counts arrivals, launches buckets in order, sets late gradients aside
bucket.py             one bucket's life cycle, from its first gradient to the update
bucket_views.py       views of a bucket's flat memory, one per gradient
reduction_queue.py    buckets whose reduction is in flight, and the buffers that they borrow
gradient_sum.py       the sum over micro-batches, and the exact mode's tree
gradient_norm.py      clips by the global norm; states/storage/squared_sums.py computes squares
expected_gradients.py predicts which gradients will arrive
unreadable_grad.py    the guard in `param.grad` between backward and step
"""
