"""Tensor parallelism: splits the layers of a model over the ranks of a replica.

plan.py                  matches the user's tensor_plan with modules
known_modules.py         finds splits in known modules; split_trial.py  tries them in others,
                         without_dropout.py  where no random number differs
split_rules.py           describes the split of a module; attention.py, multihead_attention.py
split_model.py           splits models, gathers whole parameters, restores the models
parallel_layers.py       the classes of split modules: column-wise, row-wise, embedding
region_collectives.py    collectives of tensor-parallel regions, with their backwards
replica.py               enters and leaves regions; replica_randomness.py  seeds them
graph_paths.py           refuses untried operations inside regions; user_hooks.py  refuses hooks
sequence_parallel.py     tensors of which each rank has some tokens
sequence_regather.py     saves the tokens for backward in place of the gathered input
parameter_uses.py        gathers a split parameter for lines of the user's that compute with it
torch_functions.py       tables of torch functions by what they do with a split tensor
cross_entropy.py         the loss over a vocabulary that is split
"""
