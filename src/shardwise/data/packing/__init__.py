"""Packs several documents into each row of a batch, so that there is almost no padding.

rows.py       assigns documents to rows: pure arithmetic
packing.py    `sw.Packing`, the user's options
collate.py    joins the documents of each row into the tensors of a batch
cut.py        divides the rows of a step among ranks
trial.py      tests in fp64 whether packing changes the results of a model
"""
