"""Tensor parallelism: splits the layers of a model over the ranks of a replica.

plan.py                  matches the user's tensor_plan with modules
known_modules.py         finds splits for known modules; split_trial.py  tries splits of others;
                         without_dropout.py  replaces random numbers in a trial
split_rules.py           describes the split of a module; attention.py, multihead_attention.py
split_model.py           splits models, gathers whole parameters, restores the models
parallel_layers.py       classes of split modules: column-wise, row-wise, embedding
region_collectives.py    collectives of tensor-parallel regions, with their backwards
replica.py               enters and leaves regions; replica_randomness.py  seeds them
graph_paths.py           refuses untried operations inside regions; user_hooks.py  refuses hooks
sequence_parallel.py     tensors that are split by tokens
sequence_regather.py     saves a rank's tokens for backward, not the gathered input
parameter_uses.py        gathers a split parameter for the user's own computations
torch_functions.py       tables of torch functions by their effect on a split tensor
cross_entropy.py         the loss over a split vocabulary
"""
