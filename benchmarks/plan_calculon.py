"""The predictions of Calculon (Isaev et al., SC 2023) for the rows of Korthikanti et al.

Calculon (github.com/calculon-ai/calculon, Apache 2.0) is imported from a folder and is not part of
this repository. Its own validation files describe the training of each row.
"""

import importlib
import logging
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

MODELS = {"22B": "megatron-22B", "175B": "gpt3-175B", "530B": "turing-530B", "1T": "megatron-1T"}
"""Its names of the models."""

TIMES = {"full": "full", "new": "seqsel"}
"""Its names of both columns of table 5."""

SYSTEMS = {"tab5": "a100_80g.json", "fig1": "a100_80e.json"}
"""The system of its validation of each."""


def seconds(folder: Path | None, model: str, way: str) -> float:
    """Return the seconds of a step of table 5; 0 without its folder."""
    return 0.0 if folder is None else float(_stats(folder, model, "tab5", TIMES[way])["total_time"])


def kept_gib(folder: Path | None, model: str, way: str) -> float:
    """Return GiB of activations of figure 1, "none" or "seqsel"; 0 without its folder."""
    return 0.0 if folder is None else float(_stats(folder, model, "fig1", way)["act_space"]) / 2**30


@cache
def _stats(folder: Path, model: str, figure: str, way: str) -> dict[str, Any]:
    calculon, llm = _imported(folder)
    read, name = calculon.io.read_json_file, MODELS[model]
    system = calculon.System(read(str(folder / "systems" / SYSTEMS[figure])))
    application = llm.Llm.Application(read(str(folder / "models" / f"{name}.json")))
    path = folder / "validation" / "seqsel" / figure / f"{name}_{way}.json"
    made = llm.Llm(application, logging.getLogger("calculon"))
    made.compile(system, llm.Llm.Execution.from_json(read(str(path))))
    made.run(system)
    return dict(made.get_stats_json(False))


@cache
def _imported(folder: Path) -> tuple[Any, Any]:
    """Import its modules. Its searches need pandas, a single run does not."""
    sys.path.insert(0, str(folder))
    lacks = find_spec("pandas") is None
    if lacks:
        sys.modules["pandas"] = ModuleType("pandas")
    try:
        return importlib.import_module("calculon"), importlib.import_module("calculon.llm")
    finally:
        if lacks:
            del sys.modules["pandas"]
