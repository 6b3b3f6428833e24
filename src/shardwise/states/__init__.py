"""The three states of training: parameters, gradients and optimizer state of one rank.

parameters/, gradients/, optimizer/   one package for each state
storage/             the tier of a state
tensor_spans.py      tensors of a state by name, for checkpoints; whole_gradients.py
"""
