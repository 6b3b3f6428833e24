"""Runs the examples of all docstrings, each in a forked process of its own.

    python -m tests.unit.doctests

An example may call `sw.init`, which a process does once. Forks share the imports.
"""

import doctest
import importlib
import os
import sys
import tempfile
from pathlib import Path

import shardwise

SOURCES = Path(shardwise.__file__).parent


def modules() -> list[str]:
    """Return the names of the modules with examples."""
    return sorted(
        ".".join(path.relative_to(SOURCES.parent).with_suffix("").parts).removesuffix(".__init__")
        for path in SOURCES.rglob("*.py")
        if ">>> " in path.read_text()
    )


def run(example: doctest.DocTest) -> int:
    """Run one example in an empty folder, and return the number of failures."""
    os.chdir(tempfile.mkdtemp(dir=os.environ["TMPDIR"]))
    return doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example).failed


def main() -> int:
    """Run all examples. Returns the number of those that fail."""
    failures = count = 0
    for name in modules():
        module = importlib.import_module(name)
        for example in doctest.DocTestFinder().find(module):
            if not example.examples:
                continue
            count += 1
            sys.stdout.flush()
            child = os.fork()
            if not child:
                failed = run(example)
                sys.stdout.flush()
                os._exit(min(failed, 1))
            failures += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
    print(f"{count} examples, {failures} failed")
    return failures


if __name__ == "__main__":
    sys.exit(main())
