"""Run the commands of documentation pages, and notebooks, and write what they print into them.

    python scripts/record.py docs/tour.md examples/quickstart.ipynb ...

A `sh` block that is followed by the comment <!-- output --> and a `text` block is run in an empty
folder in which `examples` is a link; the blocks of one page share the folder. The comment
<!-- output: last 12 lines --> keeps only the end, and <!-- output: exit code 5 --> expects a
failure. The host's name is replaced.
"""

import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(
    r"```sh\n(?P<command>.*?)```\n\n"
    r"<!-- output(?:: last (?P<lines>\d+) lines)?(?:: exit code (?P<code>\d+))? -->\n"
    r"```text\n(?P<output>.*?)```",
    re.S,
)
ENVIRONMENT = {"COLUMNS": "96", "OMP_NUM_THREADS": "1", "TERM": "dumb"}


def run(command: str, folder: Path, code: int) -> str:
    """Run a block of shell in `folder` and return its output.

    Raises:
        SystemExit: If its exit code is not `code`.
    """
    path = f"{ROOT / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    ran = subprocess.run(
        ["bash", "-ec", command],
        cwd=folder,
        env=os.environ | ENVIRONMENT | {"PATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if ran.returncode != code:
        raise SystemExit(f"exit code {ran.returncode} of:\n{command}\n{ran.stdout}")
    return ran.stdout


def portable(output: str, folder: Path) -> str:
    """Return `output` without the names of this machine and without trailing spaces."""
    output = re.sub(
        rf"\b{re.escape(socket.gethostname())}\b",
        "myhost",
        output.replace(f"{folder}/", "").replace(f"{ROOT}/", ""),
    )
    return re.sub(r"[ \t]+$", "", output, flags=re.M)


def record(page: Path) -> None:
    """Rewrite the outputs on one page."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "examples").symlink_to(ROOT / "examples")

        def replace(block: re.Match[str]) -> str:
            print(block["command"].strip(), file=sys.stderr)
            code = int(block["code"] or 0)
            output = portable(run(block["command"], folder, code), folder).splitlines()
            if block["lines"]:
                output = output[-int(block["lines"]) :]
            text = "\n".join(output).strip("\n")
            start, end = block.span("output")
            whole = block[0]
            first = block.start()
            return f"{whole[: start - first]}{text}\n{whole[end - first :]}"

        page.write_text(BLOCK.sub(replace, page.read_text()))


def execute(path: Path) -> None:
    """Run a notebook from top to bottom and store its outputs."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, resources={"metadata": {"path": str(path.parent)}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # the times of this run
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for each in map(Path, sys.argv[1:]):
        (execute if each.suffix == ".ipynb" else record)(each)
