"""Splits a model over ranks: tensor, pipeline and expert parallelism."""
