"""The adapter of the side-by-side suite: give its path as PROJECT_ADAPTER. Each part lies in its own file."""

from __future__ import annotations

import sys
from pathlib import Path

# The suite puts this folder on the path, where its file names would hide modules of the standard library.
FOLDER = Path(__file__).resolve().parent
sys.path[:] = [str(FOLDER.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != FOLDER)]

from collections.abc import Callable  # noqa: E402
from typing import Any  # noqa: E402

from benchmarks.peer_hash import hashers  # noqa: E402
from benchmarks.peer_trees import trees  # noqa: E402

__all__ = ["copiers", "hashers", "stores", "trees"]


def copiers(case: dict[str, Any]) -> dict[str, tuple[Callable[[], None], int]]:
    """The `copy` suite's part, imported when it is used: it brings torch."""
    from benchmarks import peer_copy

    return peer_copy.copiers(case)


def stores(case: dict[str, Any]) -> dict[str, Callable[[int, int], Any]]:
    """The `store` suite's part, imported when it is used."""
    from benchmarks import peer_store

    return dict(peer_store.stores(case))
