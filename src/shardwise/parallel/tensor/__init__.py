"""Tensor parallelism: splits a model's layers over the ranks of a replica.

plan.py                   matches the user's tensor_plan with modules
known_modules.py          finds splits for known modules, and candidates for other modules
split_trial.py            tests candidates; without_dropout.py replaces random numbers in a test
split_rules.py            describes how a module is split
attention.py              splits custom attention by heads; multihead_attention.py torch's own
split_model.py            splits models, gathers full parameters, restores the models
parallel_layers.py        classes of split modules: column-wise, row-wise, embedding
region_collectives.py     collectives of tensor-parallel regions, with their backward passes
compiled_collectives.py   the same collectives as operators in compiled graphs
compiled_sequences.py     splits compiled graphs by tokens; compiled_stand_ins.py replaces inputs
compiled_units.py         compiles units with split layers, and checks their graphs
replica.py                enters and leaves regions; replica_randomness.py seeds them
graph_paths.py            rejects operations that no trial covered; user_hooks.py rejects hooks
sequence_parallel.py      tensors that are split by tokens
sequence_regather.py      saves only this rank's tokens for the backward pass
parameter_uses.py         gathers split parameters for the user's own computations
torch_functions.py        lists torch functions by their effect on a split tensor
cross_entropy.py          computes cross entropy over a split vocabulary
chunked_cross_entropy.py  computes the last layer and its loss in chunks; chunked_loss.py uses it
"""
