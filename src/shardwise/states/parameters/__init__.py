"""Stores the parameters of one rank, replicated or sharded.

named_parameters.py      the models' parameters, with their names and layouts in memory
parameters.py            the base class, and replicated parameters
sharded_parameters.py    sharded parameters; sharded_bucket.py: one bucket of them
base_weights.py          finds the frozen weights to store in 4 bits
residency.py             decides when to gather each unit; unshard.py, bucket_gathers.py: how
parameters_at_rest.py    makes any use of a sharded parameter's values raise between gathers
saved_references.py      references that autograd saves in place of gathered parameters
read_only.py             rejects writes into gathered parameters
lost_writes.py           detects writes that read_only.py cannot reject
torch_calls.py           classifies torch functions: metadata only, or writing
"""
