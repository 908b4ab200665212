"""Pages as files: one file a page, in a folder that outlives the process and that several processes may share.

A page is written to a temporary name and renamed, so it is there whole or not at all, also after kill -9; its checksum
is verified when it is read. Files are kept under `directory/<identity digest>/<two digits>/<page hash>.page`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence

import numpy as np

from hicache_ray import faultpoints
from hicache_ray.hashing import sglang_file_key
from hicache_ray.pages import Pages
from hicache_ray.storage.base import PageContext, Storage, StorageConfig, leading
from hicache_ray.storage.file.format import PageFile, PageRead, file_bytes, read_page_file, write_page_file
from hicache_ray.storage.file.options import FileOptions
from hicache_ray.storage.file.space import FileSpace
from hicache_ray.storage.host_pages import page_runs
from hicache_ray.storage.registry import BackendError
from hicache_ray.threads import HelperThreads

logger = logging.getLogger("hicache_ray.storage")


class FileStorage(Storage):
    """L3 in a folder. Any number of ranks, instances and processes may use one folder at a time.

    Raises:
        BackendError: options that do not fit, or a folder that can't be used.
    """

    def __init__(self, config: StorageConfig) -> None:
        super().__init__(config)
        self.options = FileOptions.parse(config.extra)
        identity = config.identity
        if self.options.key_style == "sglang" and identity.pp_size > 1:
            raise BackendError(
                f"key_style 'sglang' can't tell the {identity.pp_size} pipeline stages apart (D9): use key_style 'full'"
            )
        try:
            self.space = FileSpace(self.options.directory, self.options.max_bytes, self.options.min_free_bytes)
        except OSError as error:
            raise BackendError(f"storage backend 'file' can't use its folder: {error}") from error
        self._helpers = HelperThreads("hicache-file", self.options.threads)
        self._serial = 0
        self._serial_lock = threading.Lock()
        self._closed = False

    def file_name(self, page_hash: bytes) -> str:
        """Name of a page's file, relative to the folder."""
        name = page_hash.hex()
        if self.options.key_style == "sglang":
            return f"{sglang_file_key(name, self.config.identity)}.bin"
        return f"{self.config.identity.digest}/{name[:2]}/{name}.page"

    def lookup(self, hashes: Sequence[bytes], context: PageContext | None = None) -> int:
        hits = leading(self._is_whole(self._path(self.file_name(page_hash))) for page_hash in hashes)
        self.counters.add(exists_calls=1, exists_asked=len(hashes), exists_hits=hits)
        return hits

    def load(self, hashes: Sequence[bytes], pages: Pages, context: PageContext | None = None) -> int:
        files = self._page_files(hashes, pages)
        began = time.perf_counter()
        hits = self._read(files)
        size, seconds = sum(file.page_bytes for file in files[:hits]), time.perf_counter() - began
        self.counters.add(get_calls=1, get_asked=len(hashes), get_hits=hits, get_bytes=size, get_seconds=seconds)
        return hits

    def store(self, hashes: Sequence[bytes], pages: Pages, context: PageContext | None = None) -> int:
        files = self._page_files(hashes, pages)
        if not self.config.is_writer:
            return len(hashes)
        began = time.perf_counter()
        missing = [position for position, file in enumerate(files) if not self._is_whole(file.path)]
        new = [files[position] for position in missing]
        stored = self._write(new)
        done = missing[stored] if stored < len(missing) else len(files)
        self.counters.add(
            set_calls=1,
            set_asked=len(hashes),
            set_stored=stored,
            set_existing=done - stored,
            set_bytes=sum(file.page_bytes for file in new[:stored]),
            set_seconds=time.perf_counter() - began,
        )
        return done

    def clear(self, everything: bool = False) -> None:
        """Drop the pages of this backend's identity; with `everything` those of all models and ranks."""
        own = self.file_name(b"")
        for name in self.space.names():
            if everything or self._is_own(name, own):
                self.space.forget(name)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._helpers.close()
            self.space.close()

    def _is_own(self, name: str, pattern: str) -> bool:
        if self.options.key_style == "sglang":
            return "/" not in name and name.endswith(pattern)
        return name.startswith(pattern.split("/")[0] + "/")

    def _path(self, name: str) -> str:
        return f"{self.options.directory}/{name}"

    def _name(self, path: str) -> str:
        return path[len(str(self.options.directory)) + 1 :]

    def _is_whole(self, path: str) -> bool:
        """Whether the file is there with the length of a page: what a power cut left empty or short is not."""
        try:
            size = os.stat(path).st_size
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                self._failed("look at", path, error)
            return False
        if self.host_pool is None:
            return size > 0
        return size == file_bytes(self.host_pool.page_bytes, self.options.key_style == "full")

    def _page_files(self, hashes: Sequence[bytes], pages: Pages) -> list[PageFile]:
        segments, framed = self.pool_for(hashes, pages).segments, self.options.key_style == "full"
        files = []
        for page_hash, page in zip(hashes, pages.tolist(), strict=True):
            rows = page_runs(segments, page)
            if not framed and self.config.identity.attention == "mha" and len(rows) > 2:
                rows = rows[0::2] + rows[1::2]  # SGLang's files hold all K, then all V.
            files.append(PageFile(self._path(self.file_name(page_hash)), self.storage_key(page_hash), rows, framed))
        return files

    def _read(self, pages: Sequence[PageFile]) -> int:
        """Read pages in parallel. Returns how many came whole, from the first on."""
        stamps = self.space.stamps(len(pages))
        first_failure = len(pages)

        def read(index: int) -> bool:
            nonlocal first_failure
            if index > first_failure:
                return False
            ok = self._read_one(pages[index], stamps[index])
            if not ok:
                first_failure = min(first_failure, index)
            return ok

        hits = leading(self._helpers.map(read, range(len(pages))))
        self.space.used([self._name(page.path) for page in pages[:hits]], stamps[:hits])
        return hits

    def _read_one(self, page: PageFile, stamp: int) -> bool:
        try:
            result = read_page_file(page, stamp)
            if result is PageRead.CORRUPT:
                # Removed, so that the page can be stored again: an existing file would be left as it is.
                self.counters.add(corrupt=1)
                self.space.forget(self._name(page.path))
        except OSError as error:
            self._failed("read", page.path, error)
            return False
        return result is PageRead.OK

    def _write(self, pages: Sequence[PageFile]) -> int:
        """Store pages in order up to the first failure. Returns how many are stored."""
        if not pages:
            return 0
        size, stored = sum(page.file_bytes for page in pages), 0
        try:
            if not self.space.reserve(size):
                self.counters.add(errors=1)
                return 0
        except OSError as error:
            self._failed("make room in", str(self.options.directory), error)
            return 0
        try:
            stored = self._write_reserved(pages)
        finally:
            self.space.settle(size, sum(page.file_bytes for page in pages[:stored]))
        return stored

    def _write_reserved(self, pages: Sequence[PageFile]) -> int:
        stamps = self.space.stamps(len(pages))
        temporary = self._helpers.map(lambda item: self._write_one(*item), list(zip(pages, stamps, strict=True)))
        stored = 0
        # The contents are written in parallel, the names given in order: no page is seen before its parent.
        for page, path in zip(pages, temporary, strict=True):
            if path is None or not self._rename(path, page.path):
                break
            stored += 1
        for path in filter(None, temporary[stored:]):
            _remove_quietly(path)
        self.space.used([self._name(page.path) for page in pages[:stored]], stamps[:stored])
        return stored

    def _write_one(self, page: PageFile, stamp: int) -> str | None:
        with self._serial_lock:
            self._serial += 1
            path = f"{self.space.writing}/{self._serial}.tmp"
        try:
            write_page_file(page, path, fsync=self.options.fsync)
            os.utime(path, ns=(stamp, stamp))
        except OSError as error:
            self._failed("write", page.path, error)
            _remove_quietly(path)
            return None
        return path

    def _rename(self, path: str, target: str) -> bool:
        try:
            try:
                os.rename(path, target)
            except FileNotFoundError:
                # The shard's folder is made with its first page, or was removed with a clear.
                os.makedirs(os.path.dirname(target), exist_ok=True)
                os.rename(path, target)
            faultpoints.damage("page.file", lambda: [np.memmap(target, np.uint8, "r+")])
            if self.options.fsync:
                _sync_folder(os.path.dirname(target))
        except OSError as error:
            self._failed("name", target, error)
            return False
        return True

    def _failed(self, what: str, path: str, error: OSError) -> None:
        self.counters.add(errors=1)
        if self.counters.snapshot().errors == 1:
            logger.warning("can't %s %s: %s; this is a miss, further errors are only counted", what, path, error)


def _remove_quietly(path: str) -> None:
    try:
        os.unlink(path)
    except OSError as error:
        logger.debug("temporary file %s stays until the next start: %s", path, error)


def _sync_folder(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
