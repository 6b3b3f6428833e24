"""Starts recording in a rank of `shardwise verify --stock` as soon as the rank has imported torch.

Python imports this module at startup, because its folder is first in PYTHONPATH. This module then
imports the environment's own sitecustomize.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")


LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "torchrun", "accelerate")
"""Programs that start ranks. In a batch job, they have the batch script's rank in their
environment, but are not ranks themselves."""


class _AfterTorch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads torch as usual, and then starts the recorder."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != "torch":
            return None
        sys.meta_path.remove(self)  # the next finder finds the real torch
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        self._loader = spec.loader
        spec.loader = self
        return spec

    def create_module(self, spec):  # type: ignore[no-untyped-def]
        return self._loader.create_module(spec)

    def exec_module(self, module):  # type: ignore[no-untyped-def]
        module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        if any(name in os.environ for name in RANKS):
            from shardwise.tools.verify.stock import recorder

            recorder.start()
        else:
            from shardwise.tools.verify.stock import spawned

            spawned.follow()


def _import_next() -> None:
    """Import the sitecustomize module that this one shadows, if there is one."""
    paths = [path for path in sys.path if os.path.abspath(path or ".") != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", paths)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


_import_next()
# A process without a rank may be a script that spawns its ranks. Skip processes started by
# multiprocessing: they are such ranks, which spawned.py records, or DataLoader workers.
if (
    "SHARDWISE_VERIFY_STOCK" in os.environ
    and "--multiprocessing-fork" not in sys.orig_argv
    and not any(os.path.basename(word) in LAUNCHERS for word in sys.orig_argv[1:4])
):
    sys.meta_path.insert(0, _AfterTorch())
