"""The optimizer state of one rank, and the update.

optimizer_state.py       updates each bucket; inner_optimizer.py: one optimizer over flat intervals
optimizer_kind.py, optimizer_trial.py  which optimizers may be cut, and how
optimizer_lr_and_options.py, optimizer_attributes.py  options of the user's own optimizer
users_optimizer.py       an optimizer that updates whole parameters by itself
offload_read_ahead.py    reads state from a slower tier before the update needs it
ema.py                   averages of the parameters; interval_gather.py: publishes updates
"""
