"""What the storage suite has to know about a store to test the backend of it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hicache_ray.hashing import ModelIdentity
from hicache_ray.storage.base import Storage, StorageConfig
from hicache_ray.storage.registry import create_backend, load_object


class Unsupported(Exception):
    """Something this store has not, or that can't be done to it from outside. The test is skipped with this text."""


class Damage(enum.Enum):
    """What can befall a stored page."""

    TRUNCATED = "truncated"
    EMPTIED = "emptied"
    FLIPPED_BYTE = "flipped byte"
    LOST = "lost"
    ANOTHER_PAGE = "another page under its key"


class StorageSubject:
    """A backend under test and the store behind it.

    The defaults serve a store without a server whose options say where it is. A subclass starts a server, and does to
    the store what only someone outside the backend can do: damage a page, take the store away.

    Attributes:
        name: the backend's name in the suite's table.
        clears_all: why `clear` drops other identities' pages too, where it does.
    """

    clears_all = ""

    def __init__(self, backend: str | type[Storage], extra: Mapping[str, Any] | None = None, label: str = "") -> None:
        """Test `backend` with the options `extra`.

        Args:
            backend: a registered name, "module:Class", or a class; it is made from a StorageConfig.
            extra: its options. "{folder}" in a text becomes the test's own empty folder.
            label: name in the suite's table, when it is not the backend's.
        """
        self.backend = backend
        self.name = label or (backend if isinstance(backend, str) else backend.__name__)
        self._extra = dict(extra or {})

    def start(self, folder: Path) -> None:
        """Bring up the store, once for all tests of the suite. Unsupported skips them all, with its reason."""

    def stop(self) -> None:
        """Take the store down again."""

    def empty(self, folder: Path) -> None:
        """Make the store empty, before each test. A store inside the test's own folder is."""

    def extra(self, folder: Path) -> dict[str, Any]:
        """Options of a backend on the store."""
        return {
            name: value.replace("{folder}", str(folder)) if isinstance(value, str) else value
            for name, value in self._extra.items()
        }

    def make(
        self, folder: Path, identity: ModelIdentity, *, timeout: float = 30.0, is_writer: bool = True, **more: Any
    ) -> Storage:
        """A backend on the store; `more` are options beside those of `extra`."""
        config = StorageConfig(identity, {**self.extra(folder), **more}, timeout, is_writer)
        if not isinstance(self.backend, str):
            return self.backend(config)
        if ":" in self.backend:
            backend = load_object(self.backend)(config)
            assert isinstance(backend, Storage)
            return backend
        return create_backend(self.backend, config)

    def close(self, storage: Storage) -> None:
        """Close a backend at the end of a test."""
        storage.close()

    def make_small(self, folder: Path, identity: ModelIdentity, page_bytes: int) -> tuple[Storage, int]:
        """A backend on an empty store that holds about 16 pages of `page_bytes`, or as few as it can; and how many it
        holds at most."""
        raise Unsupported("the store has no capacity that a test could set")

    def damage(self, damage: Damage, storage: Storage, page_hash: bytes, folder: Path) -> None:
        """Damage the stored page behind the backend's back."""
        raise Unsupported("the store can't be damaged from outside")

    def take_away(self, folder: Path) -> None:
        """Make the store fail: kill its server, unplug its disk."""
        raise Unsupported("there is no server to kill")

    def bring_back(self, folder: Path) -> None:
        """End `take_away`."""

    def freeze(self, folder: Path) -> None:
        """Make the store hang: stop its server."""
        raise Unsupported("there is no server to freeze")

    def thaw(self, folder: Path) -> None:
        """End `freeze`."""
