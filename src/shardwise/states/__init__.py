"""The three states of training: parameters, gradients and optimizer state of one rank.

parameters/, gradients/, optimizer/   one package for each state
storage/             stores the bytes of a state on its tier
whole_gradients.py   shows the whole gradients of a step to user code
step_totals.py       totals that all ranks agree on, and statistics for users
step_hooks.py        hooks around a step, for groups of ranks that step apart
"""
