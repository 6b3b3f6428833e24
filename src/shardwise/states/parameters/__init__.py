"""The parameters of one rank.

parameters.py            replicated; sharded_parameters.py, sharded_bucket.py: sharded
unshard.py               gathers sharded parameters; bucket_gathers.py, residency.py: when
parameters_at_rest.py    a parameter between two gathers; saved_references.py, lost_writes.py
update_intervals.py      the intervals of a bucket that this rank updates
named_parameters.py      parameters by name
"""
