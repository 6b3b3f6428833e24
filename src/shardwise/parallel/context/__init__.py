"""Context parallelism: ranks hold parts of the same sequences, and exchange tokens for attention.

token_exchange.py        moves parts of sequences between ranks
methods.py               computes attention by exchanging heads (Ulysses) or gathering keys
attention.py             computes attention over full sequences while the model sees only parts
transformers_inputs.py   adds the inputs that Transformers models need to run on parts
sequence_trial.py        tests on the first batch that parts give the same result as full sequences
"""
