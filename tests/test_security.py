"""What docs/security.md says: nothing is parsed on trust, sizes are bounded first, files are private, tokens count."""

from __future__ import annotations

import ast
import os
import stat
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hicache_ray.hashing import ModelIdentity, Namespace, page_hashes
from hicache_ray.index.catalog import Catalog, CatalogEntry, CatalogError
from hicache_ray.rank.step import MAX_MESSAGE_BYTES, Admit, Finish, ProtocolError, StepAnswer, StepRequest
from hicache_ray.storage.pool.membership import Membership
from hicache_ray.storage.pool.near import LONGEST_MESSAGE
from hicache_ray.storage.pool.wire import Commit, KeyCall, Offer, Release, Reply, WireError
from hicache_ray.storage.shard.arena import Arena
from hicache_ray.storage.shard.files import read_owner, sweep
from hicache_ray.storage.shard.layout import FILE_HEADER, ArenaError, ArenaGeometry
from hicache_ray.testing.subject import StorageSubject
from hicache_ray.testing.suite_base import page_names
from tests.conftest import REPOSITORY
from tests.test_faults_store import PAGES, open_files

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.binary(max_size=20)
    | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=4) | st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=20,
)
PACKED = JSON.map(lambda value: msgpack.packb(value, use_bin_type=True))


def holes_of(message: bytes) -> st.SearchStrategy[bytes]:
    """A good message, somewhere cut, lengthened or with other bytes in it."""
    at = st.integers(0, len(message))
    return st.one_of(
        at.map(lambda n: message[:n]),
        st.binary(max_size=8).map(lambda tail: message + tail),
        st.tuples(at, st.binary(min_size=1, max_size=8)).map(
            lambda x: message[: x[0]] + x[1] + message[x[0] + len(x[1]) :]
        ),
    )


def damaged(message: bytes) -> st.SearchStrategy[bytes]:
    """Anything but a good message, most of it close to one."""
    return holes_of(message) | st.binary(max_size=64) | PACKED


STEP = StepRequest(
    1, 2, ("a",), (Finish("f", b"\0" * 8),), (Admit("r", b"\1\0\0\0", Namespace("x"), 1, 4),), ("p",), ("s",)
).encode()
ANSWER = StepAnswer(1, 2, timings_us={"total": 1.0}).encode()
CATALOG = Catalog((CatalogEntry(-1, Namespace(), b"\0" * 8, b"h" * 32, 1, 2, 3, 1, 0),), 4, 2).pack()
CALL = KeyCall(3, [b"k" * 48, b"l" * 48], 4096, b"label")
COMMIT = Commit(7, [0, 1, 2], [True] * 3).pack()
REPLY = Reply(0, 1, 2, 3, b"\1\0").pack()
MEMBERSHIP = Membership(4, ("a", "b"), 2, "token").pack()

PARSERS: dict[str, tuple[Callable[[bytes], Any], type[Exception], bytes]] = {
    "step request": (StepRequest.decode, ProtocolError, STEP),
    "step answer": (StepAnswer.decode, ProtocolError, ANSWER),
    "catalog": (lambda message: Catalog.unpack(message).hashes, CatalogError, CATALOG),
    "storage call": (KeyCall.unpack, WireError, CALL.pack()),
    "storage offer": (Offer.unpack, WireError, Offer(CALL, [1.5, 2.5], True).pack()),
    "storage release": (Release.unpack, WireError, Release(7, [1, 2]).pack()),
    "storage commit": (Commit.unpack, WireError, COMMIT),
    "storage reply": (Reply.unpack, WireError, REPLY),
    "membership": (Membership.unpack, ValueError, MEMBERSHIP),
}


@pytest.mark.parametrize("name", PARSERS)
def test_a_message_is_what_it_says_or_an_error_with_a_name(name: str) -> None:
    """Fuzzed: whatever arrives is parsed or refused with the parser's own error, never with another."""
    parse, error, good = PARSERS[name]
    parse(good)

    @settings(max_examples=400)
    @given(damaged(good))
    @example(b"")
    @example(b"null")
    @example(b"1")
    @example(b"[1, 2, 3, 4]")
    @example(b"[" * 5000)
    @example(b"\x91" * 5000)
    def fuzz(message: bytes) -> None:
        try:
            parse(message)
        except error:
            return

    fuzz()


def test_sizes_are_bounded_before_anything_is_allocated() -> None:
    """A length that somebody sends is compared with what is there, or with a limit, first."""
    with pytest.raises(ProtocolError, match="at most"):
        StepRequest.decode(_Long(MAX_MESSAGE_BYTES + 1))
    for bomb in (b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff"):
        with pytest.raises(ProtocolError):
            StepRequest.decode(bomb)
        with pytest.raises(CatalogError):
            Catalog.unpack(bomb)
        for message in (KeyCall, Commit, Release, Reply):
            with pytest.raises(WireError):
                message.unpack(bomb)
    assert LONGEST_MESSAGE <= 16 << 20


class _Long(bytes):
    """Bytes that only say that they are many."""

    _length = 0

    def __new__(cls, length: int) -> _Long:
        new = super().__new__(cls)
        new._length = length
        return new

    def __len__(self) -> int:
        return self._length


def arena_of(folder: Path) -> bytes:
    path = folder / "hicache-token-a.arena"
    arena = Arena.create(path, ArenaGeometry(4, 4096), {"service": "s"})
    cells = np.array(arena.divide_segment(0, 1024))[:2]
    arena.mark_writing(cells, arena.next_generation(2), 1000)
    arena.mark_valid(cells, [b"k" * 48, b"l" * 48], np.arange(2, dtype=np.uint64), b"", float("inf"))
    arena.close()
    content = path.read_bytes()
    path.unlink()
    return content


def test_an_arena_file_is_one_or_is_refused(tmp_path: Path) -> None:
    """Fuzzed: whoever wrote to the file, opening it gives pages that were sealed, or ArenaError."""
    good = arena_of(tmp_path)
    path = tmp_path / "hicache-token-a.arena"
    interesting = st.integers(0, FILE_HEADER.itemsize + 2048) | st.integers(0, len(good) - 8)

    @settings(max_examples=300)
    @given(st.lists(st.tuples(interesting, st.binary(min_size=1, max_size=8)), max_size=4), st.integers(0, len(good)))
    @example([(24, struct.pack("<QQ", 0, 0))], 0)
    @example([(24, struct.pack("<QQ", 2**60, 2**60))], 0)
    @example([(12, struct.pack("<I", 2**32 - 1))], 0)
    def fuzz(changes: list[tuple[int, bytes]], cut: int) -> None:
        content = bytearray(good)
        for at, other in changes:
            content[at : at + len(other)] = other
        path.write_bytes(bytes(content[cut:] if cut and cut % 7 == 0 else content[: len(good)]))
        try:
            arena = Arena.open(path)
            for survivor in arena.survivors():
                assert survivor.length <= arena.geometry.segment_bytes
            arena.close()
            read_owner(path)
        except ArenaError:
            pass
        sweep(tmp_path, lambda owner: False)

    fuzz()


@pytest.mark.parametrize("owner", [b"[1]", b"1", b'"x"', b"\xff\xfe", b"[" * 1500, b'{"raylet_pid": []}'])
def test_a_planted_file_does_not_stop_a_storage_actor(tmp_path: Path, owner: bytes) -> None:
    """/dev/shm can be written by every user of the machine: what looks like an arena and is none is left alone."""
    content = bytearray(arena_of(tmp_path))
    content[12:16] = struct.pack("<I", len(owner))
    content[2048 : 2048 + len(owner)] = owner
    planted = tmp_path / "hicache-0000-x.arena"
    planted.write_bytes(bytes(content))
    assert sweep(tmp_path, lambda facts: int(facts["raylet_pid"]) > 0) == []
    assert planted.exists()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    """Neither to read a file that is none of ours nor to delete it."""
    secret = tmp_path / "secret"
    secret.write_bytes(arena_of(tmp_path))
    (tmp_path / "hicache-0000-x.arena").symlink_to(secret)
    assert sweep(tmp_path, lambda owner: True) == []
    assert secret.exists()
    with pytest.raises(OSError, match="symbolic links"):
        Arena.open(tmp_path / "hicache-0000-x.arena")


def test_a_page_file_is_whole_or_a_miss(tmp_path: Path) -> None:
    """Fuzzed: no file content is ever taken for a page that was not written."""
    store, pool = open_files(tmp_path)
    store.store(PAGES, np.arange(6))
    (path,) = (tmp_path / "pages").rglob(f"{PAGES[0].hex()}.page")
    good = path.read_bytes()

    @settings(max_examples=150)
    @given(holes_of(good) | st.binary(max_size=200))
    def fuzz(content: bytes) -> None:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        assert store.load(PAGES[:1], np.array([8])) == int(content == good)
        if content == good:
            assert np.array_equal(pool.read(0), pool.read(8))

    fuzz()
    store.close()


def test_files_and_arenas_are_private(tmp_path: Path) -> None:
    store, pool = open_files(tmp_path)
    store.store(PAGES, np.arange(6))
    store.close()
    arena = Arena.create(tmp_path / "one.arena", ArenaGeometry(1, 4096))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) >= 7
    for path in files:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    arena.close()


def test_namespaces_do_not_meet(tmp_path: Path) -> None:
    """Another tenant, salt or adapter, or another model: other keys, so a page of one is never found by another."""
    tokens = np.arange(8, dtype="<u4")
    spaces = [Namespace(), Namespace("a"), Namespace(salt="a"), Namespace(tenant="a"), Namespace("a", "a", "a")]
    keys = {h for space in spaces for h in page_hashes(tokens, 4, namespace=space)}
    assert len(keys) == 2 * len(spaces)
    subject = StorageSubject("file", {"directory": str(tmp_path / "pages"), "min_free_bytes": 0})
    one, pool = open_files(tmp_path)
    one.store(PAGES, np.arange(6))
    other = subject.make(tmp_path, ModelIdentity("n", page_size=4, layout="page_first"))
    other.register_host_pool(pool)
    assert other.lookup(PAGES) == 0
    assert other.load(PAGES, np.arange(8, 14)) == 0
    other.clear()
    assert one.lookup(PAGES) == 6
    one.close()
    other.close()
    assert len(page_names(2)) == 2


def test_nothing_of_ours_is_pickled_or_evaluated() -> None:
    """What crosses between processes by our own code is msgpack, fixed structs or JSON; Ray's own calls are Ray's."""
    found = []
    for path in sorted((REPOSITORY / "hicache_ray").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                found += [f"{path.name}: {name}" for name in names if name.split(".")[0] in _NEVER]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
                found.append(f"{path.name}:{node.lineno} {node.func.id}")
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("yaml.load", "torch.load", "np.load"):
                found.append(f"{path.name}:{node.lineno} {ast.unparse(node.func)}")
    assert not found


_NEVER = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}

TOKEN_MODE = """
import os, sys, tempfile
import ray
from tests.ray_service import config
from hicache_ray.service import RayStart, start
with tempfile.TemporaryDirectory(prefix="hc") as folder:
    settings = RayStart(num_cpus=2, object_store_bytes=100 << 20, temp_dir=folder)
    with start(config(tp_size=1, storage_actors=1), name="guarded", ray_start=settings):
        print(ray.get_runtime_context().gcs_address, flush=True)
        sys.stdin.readline()
"""
CONNECT = "import sys, hicache_ray; print(hicache_ray.connect('guarded', address=sys.argv[1]).name)"


@pytest.mark.ray
def test_without_the_cluster_s_token_nobody_gets_in(tmp_path: Path) -> None:
    """Everything, admin calls included, goes through Ray: where it wants a token, who has none is refused."""
    token = "0123456789abcdef" * 4
    base = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    base |= {"PYTHONPATH": str(REPOSITORY), "HOME": str(tmp_path), "RAY_AUTH_MODE": "token"}
    known = {**base, "RAY_AUTH_TOKEN": token}
    server = subprocess.Popen(
        [sys.executable, "-c", TOKEN_MODE], env=known, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        assert address

        def connects(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-c", CONNECT, address]
            return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)

        assert connects(known).stdout.strip() == "guarded"
        for wrong in ({**base, "RAY_AUTH_TOKEN": "f" * 64}, {**base, "RAY_AUTH_MODE": "disabled"}):
            refused = connects(wrong)
            assert refused.returncode != 0 and "guarded" not in refused.stdout
    finally:
        server.communicate("\n", timeout=60)
