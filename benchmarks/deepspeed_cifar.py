"""DeepSpeed's CIFAR example, unmodified, on artificial images, through `shardwise deepspeed`.

    git clone https://github.com/deepspeedai/DeepSpeedExamples
    python benchmarks/deepspeed_cifar.py DeepSpeedExamples --ranks 2 --stage 2

Images of a class have its colour under noise, so that a few hundred steps can classify them. They
replace CIFAR-10 in torchvision's folder, and its check of the files' sums is off. The example
prints the mean loss, and the accuracy on images that it has not seen. Needs torchvision.
"""

import argparse
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

UNCHECKED = """
import sys
from importlib.abc import MetaPathFinder


class Unchecked(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "torchvision.datasets.cifar":
            return None
        sys.meta_path.remove(self)
        from importlib.util import find_spec

        spec = find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            module.check_integrity = lambda path, md5=None: True

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Unchecked())
"""
"""As sitecustomize: makes torchvision accept files with other sums than CIFAR-10's."""


def batch(rows: int, draws: np.random.Generator) -> dict[str, object]:
    """Return a file of CIFAR-10: `rows` images of 3 x 32 x 32 bytes, with classes in turn."""
    labels = np.arange(rows) % 10
    colours = np.random.default_rng(0).integers(40, 216, (10, 3))
    images = colours[labels][:, :, None] + draws.normal(0, 30, (rows, 3, 1024))
    data = images.clip(0, 255).astype(np.uint8).reshape(rows, 3072)
    return {"data": data, "labels": labels.tolist()}


def make(folder: Path, rows: int) -> None:
    """Write `rows` images for training and a tenth as many for tests, in CIFAR-10's files."""
    place = folder / "data" / "cifar-10-batches-py"
    place.mkdir(parents=True)
    draws = np.random.default_rng(1)
    names = [f"data_batch_{number}" for number in range(1, 6)]
    for name in names:
        (place / name).write_bytes(pickle.dumps(batch(rows // 5, draws)))
    (place / "test_batch").write_bytes(pickle.dumps(batch(max(20, rows // 200 * 20), draws)))
    meta = {"label_names": [f"class {number}" for number in range(10)]}
    (place / "batches.meta").write_bytes(pickle.dumps(meta))


def main() -> None:
    """Write the images, and run the example."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("examples", type=Path, help="a checkout of DeepSpeedExamples")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stage", default="2")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--epochs", default="2")
    parser.add_argument("--images", type=int, default=3200)
    given = parser.parse_args()
    script = given.examples.resolve() / "training" / "cifar" / "cifar10_deepspeed.py"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder, given.images)
        (folder / "sitecustomize.py").write_text(UNCHECKED)
        paths = [name, *filter(None, [os.environ.get("PYTHONPATH")])]
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "DS_ACCELERATOR": "cpu"}
        words = [sys.executable, "-m", "shardwise", "deepspeed", "--bind_cores_to_rank"]
        words += ["--num_gpus", str(given.ranks), str(script), "--deepspeed"]
        words += ["--stage", given.stage, "--dtype", given.dtype, "--epochs", given.epochs]
        words += ["--log-interval", "100"]
        sys.exit(subprocess.run(words, cwd=folder, env=environ).returncode)


if __name__ == "__main__":
    main()
