"""The adapter of the side-by-side suite: give its path as PROJECT_ADAPTER. Each part lies in its own file."""

from __future__ import annotations

import sys
from pathlib import Path

# The suite puts this folder on the path, where its file names would hide modules of the standard library.
FOLDER = Path(__file__).resolve().parent
sys.path[:] = [str(FOLDER.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != FOLDER)]

from benchmarks.peer_hash import hashers  # noqa: E402
from benchmarks.peer_trees import trees  # noqa: E402

__all__ = ["hashers", "trees"]
