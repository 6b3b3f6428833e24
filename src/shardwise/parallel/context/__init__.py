"""Context parallelism: ranks have parts of the same sequences, and exchange tokens for attention.

token_exchange.py        moves parts of sequences between ranks
methods.py               computes attention by exchanged heads (Ulysses), or gathered keys
attention.py             runs attention on whole sequences while the model sees parts
transformers_inputs.py   adds inputs that models of Transformers need on parts
sequence_trial.py        tests on the first batch that parts give the result of whole sequences
"""
