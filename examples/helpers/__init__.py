"""Helpers that several examples share. None of them can be run.

gpt.py       the GPT of language_model.py, diloco.py, parameter_server.py, larger_than_memory.py
corpus.py    the text that it learns; bpe.py, its tokenizer
images.py    digits for mnist.py
lanes.py     text for the LSTM of ptb.py
batches.py   a check of the batch settings
log.py       progress, metrics.jsonl and TensorBoard events; screen.py, a progress bar only
report.py    the closing table and plots; accuracy.py, islands_plot.py, staleness_plot.py
sizes.py     runs an example at several numbers of workers
"""
