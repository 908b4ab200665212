"""Options of the file backend."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from hicache_ray.storage.options import (
    KEY_STYLES,
    Reader,
    backend_options,
    read_bool,
    read_choice,
    read_count,
    read_size,
)
from hicache_ray.storage.registry import BackendError

DIRECTORY_VARIABLE = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
"""Environment variable that names the folder when the options do not, as in SGLang."""


class FileOptions(NamedTuple):
    """Options of the file backend, in the extra config under these names.

    Attributes:
        directory: folder of the pages; made when absent.
        max_bytes: most bytes of pages, over all processes that use the folder; None: no cap.
        min_free_bytes: bytes of the file system that are never used.
        threads: helper threads that read and write the pages of a call in parallel.
        fsync: write each page through to the disk before it becomes visible. Without it a power cut may lose pages,
            never falsify them.
        key_style: "full" names pages by the whole identity; "sglang" writes the files SGLang's file backend writes
            (case 9), of which only the length can be checked.
    """

    directory: Path
    max_bytes: int | None = None
    min_free_bytes: int = 1 << 30
    threads: int = 4
    fsync: bool = False
    key_style: str = "full"

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> FileOptions:
        """Read the options; BackendError names the one that does not fit."""
        given = backend_options("file", extra, _READERS)
        directory = given.pop("directory", "") or os.environ.get(DIRECTORY_VARIABLE)
        if not directory:
            raise BackendError(
                f"storage backend 'file' needs a folder: set the option 'directory', or {DIRECTORY_VARIABLE}"
            )
        return cls(directory=Path(directory).expanduser().absolute(), **given)


_READERS: dict[str, Reader] = {
    "directory": lambda name, value: str(value),
    "max_bytes": read_size,
    "min_free_bytes": read_size,
    "threads": read_count,
    "fsync": read_bool,
    "key_style": partial(read_choice, choices=KEY_STYLES),
}
