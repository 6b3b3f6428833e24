"""The optimizer state of one rank, and the update.

optimizer_state.py     lays out masters and state, and makes the inner optimizers
existing_optimizer_state.py  takes over state of the user's optimizer or of a checkpoint
inner_optimizer.py     updates the intervals of a bucket; users_optimizer.py: whole parameters
offloaded_update.py    updates states on a disk or on the host, span by span
update_interval.py     the interval of a bucket that this rank updates, in segments
optimizer_options.py   follows options, attributes and step hooks of the user's optimizer
optimizer_kind.py      what optimizers need whole; optimizer_trial.py finds it out by trial
ema.py                 averages of the parameters
interval_gather.py     gathers whole masters and state, for a rebuild
"""
