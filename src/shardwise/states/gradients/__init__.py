"""Gradients of one rank: collected in buckets during backward, reduced over ranks, then consumed.

gradients.py          counts arrivals, starts buckets in order, sets late gradients aside
bucket.py             one bucket, from the first gradient of a backward to the update
bucket_views.py       views of a bucket's flat memory, one for each gradient
reduction_queue.py    buckets in a collective, and the buffers that they borrow
gradient_sum.py       the sum over micro-batches, and the exact mode's tree
gradient_norm.py      clips by the global norm; states/storage/squared_sums.py computes squares
expected_gradients.py learns which gradients will arrive
unreadable_grad.py    the guard in `param.grad` between backward and step
"""
