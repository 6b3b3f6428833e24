"""Code that the bridges to other libraries share.

joining.py          joins the run that a launcher has started
trained_models.py   creates one engine for each connected set of models and optimizers
trained_engine.py   one of these engines, and its state between backward and step
plain_gradients.py  averages gradients of models that no prepared optimizer trains
exact_mean.py       exact_mean=True: counts each sample once, and weights losses by item counts
sequence_batches.py splits the sequences of the batches of a library's loaders (`--context`)
deepspeed_json.py   applies a DeepSpeed config in another library's training loop
written_files.py    writes files on the main rank for all ranks
"""
