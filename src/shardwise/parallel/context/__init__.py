"""Context parallelism: ranks have parts of the same sequences, and exchange heads for attention.

heads_exchange.py   exchanges parts of sequences for heads, and back (Ulysses)
attention.py        runs attention on whole sequences while the model sees parts
sequence_trial.py   tests on the first batch that parts give the result of whole sequences
"""
