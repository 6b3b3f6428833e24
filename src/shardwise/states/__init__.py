"""The three states of training: parameters, gradients and optimizer state of one rank.

parameters/, gradients/, optimizer/   one package for each state
storage/             the tier of a state
whole_gradients.py   the gradients of a step, whole, for the user
"""
