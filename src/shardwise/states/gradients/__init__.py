"""The gradients of one rank.

gradients.py             from the hook of a parameter to the bucket's sum
bucket_fill.py, bucket_reducer.py, gradient_accumulator.py  the life of one bucket
gradient_norm.py         the global norm; exact_squared_sums.py: in the exact mode
unused_parameters.py     parameters that get no gradient
unreadable_grad.py       `param.grad` between backward and step
"""
