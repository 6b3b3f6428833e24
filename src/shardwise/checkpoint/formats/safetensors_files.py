"""Opens safetensors files: a whole or split model (Transformers, Diffusers), or an adapter."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from shardwise.checkpoint.file_system import read_whole
from shardwise.checkpoint.formats import torch_files, training_dict
from shardwise.checkpoint.formats.saved import Checkpoint, Leaf, MappedReader, reading
from shardwise.checkpoint.reader import SafetensorsReader, files_of

STEMS = ("model", "diffusion_pytorch_model", "pytorch_model", "adapter_model")
"""Names of sets in folders: of transformers, diffusers, older transformers, and PEFT's adapters."""

CONFIGS = (
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
"""Small files of a model that an export copies."""

_LARGEST_CONFIG = 64 * 2**20


def open_checkpoint(path: Path) -> Checkpoint | None:
    """Open a safetensors file or a model folder. Returns None if `path` is neither."""
    if path.is_dir():
        return open_folder(path)
    if path.suffix != ".safetensors":
        return None
    return _open([path], path, "safetensors")


def open_folder(path: Path) -> Checkpoint | None:
    """Open the model or adapter in the folder `path`. Returns None if there is none."""
    for stem in STEMS:
        if (files := files_of(path, stem, ".safetensors")) is not None:
            format = "PEFT adapter" if stem == "adapter_model" else "Transformers"
            checkpoint = _open(files, path, f"{format} folder")
            checkpoint.config = read_configs(path)
            return checkpoint
    for stem in ("pytorch_model", "adapter_model"):
        if (files := files_of(path, stem, ".bin")) is not None:
            return _open_pickles(path, files)
    return None


def _open(files: list[Path], path: Path, format: str) -> Checkpoint:
    with ExitStack() as stack:
        reader = SafetensorsReader(files)
        stack.callback(reader.close)
        checkpoint = Checkpoint(format, path, reader, has_checksums=False)
        # safetensors' save_model stores the names of tied weights in the metadata.
        checkpoint.aliases = {a: f for a, f in reader.metadata.items() if f in reader.specs}
        checkpoint.facts = {"files": str(len(files))}
        checkpoint.stack = stack.pop_all()
        return checkpoint


def _open_pickles(path: Path, files: list[Path]) -> Checkpoint:
    """Open a split model that torch.save has written."""
    leaves: dict[str, Leaf] = {}
    for file in files:
        content, _ = torch_files.load(file)
        with reading(file, torch_files.WHAT):
            tree, _ = torch_files.as_tree(content, file)
            part = training_dict.interpret(tree, file)["model"]
        leaves |= part.leaves
    checkpoint = Checkpoint("Transformers folder", path, MappedReader(leaves))
    checkpoint.config = read_configs(path)
    checkpoint.damages = lambda rank, size: torch_files.damages(files[rank::size])
    return checkpoint


def read_configs(path: Path) -> dict[str, bytes]:
    """Return the small files of a model, by name."""
    return {
        name: read_whole(path / name)
        for name in CONFIGS
        if (path / name).is_file() and (path / name).stat().st_size <= _LARGEST_CONFIG
    }
