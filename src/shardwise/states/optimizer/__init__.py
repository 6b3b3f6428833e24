"""Stores the optimizer state of one rank, and runs the update.

optimizer_state.py     lays out master weights and state, and creates the inner optimizers
existing_optimizer_state.py  adopts the state of the user's optimizer or of a checkpoint
inner_optimizer.py     updates the intervals of buckets; users_optimizer.py: full parameters
offloaded_update.py    updates state on a disk or on the host, span by span
update_interval.py     the interval of a bucket that this rank updates, in segments
optimizer_options.py   tracks options, attributes and step hooks of the user's optimizer
optimizer_kind.py      which data an optimizer needs; optimizer_trial.py finds out by trial
ema.py                 exponential moving averages of the parameters
interval_gather.py     gathers full masters and state, for a new layout
"""
