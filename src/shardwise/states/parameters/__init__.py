"""Parameters of one rank, replicated or sharded.

named_parameters.py      parameters of the models, with names and forms
parameters.py            the base class, and replicated parameters
sharded_parameters.py    sharded parameters; sharded_bucket.py: one bucket of them
residency.py             when each unit is whole; unshard.py, bucket_gathers.py: the gathers
parameters_at_rest.py    sharded parameters between gathers: any use of their values raises
saved_references.py      references that autograd saves in place of gathered parameters
read_only.py             refuses writes into gathered parameters; lost_writes.py detects others
"""
