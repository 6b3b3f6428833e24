"""Implements parallelism inside a replica of the model: tensor parallel and pipeline parallel."""
