"""The three states of training on one rank: parameters, gradients and optimizer state.

parameters/, gradients/, optimizer/   one package for each state
storage/             stores the bytes of a state on its tier
shard_groups.py      names the ranks that share each bucket
second_copies.py     updates a copy of another rank's optimizer state, in case that rank is lost
whole_gradients.py   lets user code read and change the full gradients of a step
step_totals.py       totals that all ranks agree on, and statistics for users
step_hooks.py        hooks around a step, for groups of ranks that step independently
"""
