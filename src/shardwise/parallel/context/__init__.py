"""Context parallelism: ranks hold parts of the same sequences, and exchange tokens for attention.

token_exchange.py        moves parts of sequences between ranks
compiled_exchange.py     the same exchange as an operator in compiled graphs
methods.py               computes attention by exchanging heads (Ulysses) or gathering keys
attention.py             computes attention over full sequences while the model sees only parts
transformers_inputs.py   adds the inputs that Transformers models need to run on parts
drawn_weights.py         gives the parameters of a trial values only while they are used
flash_attention.py       runs the flash attention of Transformers models on full sequences
planned_attention.py     runs modules that compute attention themselves on full sequences
sequence_trial.py        tests on the first batch that parts give the same result as full sequences
"""
