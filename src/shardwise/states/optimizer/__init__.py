"""The optimizer state of one rank, and the update.

optimizer_state.py     lays out masters and state, and makes the inner optimizers
inner_optimizer.py     updates the intervals of a bucket; users_optimizer.py: whole parameters
offloaded_update.py    the same where states are on a disk or on the host, span by span
update_interval.py     the interval of a bucket that this rank updates, in segments
optimizer_options.py   options, attributes and step hooks of the user's own optimizer
optimizer_kind.py      which optimizers may be cut, and how; optimizer_trial.py: found by trial
ema.py                 averages of the parameters
interval_gather.py     gathers whole masters and state, for a rebuild
"""
