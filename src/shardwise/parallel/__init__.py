"""Splits a model over ranks: tensor, pipeline, expert and context parallelism."""
