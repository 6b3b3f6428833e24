"""Records which Shardwise functions are on the stack when certain events happen.

A walk in ARCHITECTURE.md is the union of these stacks: the functions between the user's call and
its effect.
"""

import os
import sys
from pathlib import Path
from types import FrameType

PACKAGE = f"{os.sep}src{os.sep}shardwise{os.sep}"


class Walk:
    """The lines `file: function` of a walk, in the order of their first occurrence."""

    def __init__(self) -> None:
        self.lines: dict[str, None] = {}
        self.types: set[str] = set()

    def note(self) -> None:
        """Add the functions of Shardwise that are on the stack of the caller."""
        stack: list[str] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            file, name = frame.f_code.co_filename, frame.f_code.co_qualname
            # Inner functions and lambdas are part of the function that they are written in.
            name = name.partition(".<locals>")[0]
            if PACKAGE in file and not name.startswith("<l"):
                stack.append(f"{file.rpartition(PACKAGE)[2]}: {name}")
                if "self" in frame.f_locals:
                    self.types.add(type(frame.f_locals["self"]).__name__)
            frame = frame.f_back
        self.lines.update(dict.fromkeys(reversed(stack)))

    def write(self, path: Path) -> None:
        """Write the lines, and the types as a last line."""
        text = "\n".join([*self.lines, "types: " + " ".join(sorted(self.types))])
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.write_text(text + "\n")
        draft.rename(path)  # a process may be killed at any moment
