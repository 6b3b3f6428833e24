"""Packs several documents into each row of a batch, so that almost nothing is padding.

rows.py       assigns documents to rows: pure arithmetic
packing.py    `sw.Packing`, the user's choice
collate.py    joins the documents of each row into the tensors of a batch
cut.py        shares the rows of a step between ranks
trial.py      tests in fp64 whether packing changes the results of a model
"""
