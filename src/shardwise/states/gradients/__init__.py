"""Gradients of one rank: collected in buckets during backward, reduced over ranks, then consumed.

gradients.py          counts arrivals, starts buckets in order, sets late gradients aside
bucket.py             one bucket, from the first gradient of a backward to the update
bucket_views.py       where each gradient goes in the bucket's flat memory
reduction_queue.py    buckets in a collective, and the buffers that they borrow
gradient_sum.py       the sum over micro-batches, and the exact mode's tree
gradient_norm.py      clips by the global norm; its squares: states/storage/squared_sums.py
expected_gradients.py which gradients will arrive
unreadable_grad.py    the guard in `param.grad` until the step is made
"""
