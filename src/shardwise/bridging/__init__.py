"""Code that the bridges to other libraries share.

joining.py          joins the run that a launcher has started
trained_models.py   makes one engine for each connected set of models and optimizers
trained_engine.py   one such engine, with the state between backward and step
plain_gradients.py  averages gradients of models that no prepared optimizer trains
exact_mean.py       exact_mean=True: counts each sample once, and weighs losses by their items
deepspeed_json.py   a DeepSpeed JSON in a loop of another library
written_files.py    files that the main rank writes for all
"""
