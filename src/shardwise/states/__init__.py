"""The three states of training: parameters, gradients and optimizer state of one rank.

parameters                 parameters.py (replicated), sharded_parameters.py, residency.py
gradients                  gradients.py, bucket_fill.py, bucket_reducer.py,
                           gradient_accumulator.py, gradient_norm.py, unreadable_grad.py
optimizer state            optimizer_state.py, inner_optimizer.py, optimizer_lr_and_options.py
unused parameters          unused_parameters.py
in memory, host, NVMe      storage.py, host_storage.py, storage_factory.py, offload_read_ahead.py
"""
