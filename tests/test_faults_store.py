"""Kinds of failure of docs/reliability.md: unreachable prefixes, narrow keys, lookups that lie, broken backends, lost
owners, files.
"""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hicache_ray.deadline import Deadline
from hicache_ray.faults.injector import injected
from hicache_ray.faults.plan import FaultPlan
from hicache_ray.hashing import ModelIdentity, Namespace, page_hashes
from hicache_ray.rank.local_group import LocalGroup
from hicache_ray.rank.step import Chunk, Control, Finish
from hicache_ray.replay.driver import ENGINE, settle
from hicache_ray.storage.file import format as file_format
from hicache_ray.storage.file.storage import FileStorage
from hicache_ray.storage.guard import ERRORS_IN_A_ROW
from hicache_ray.storage.memory import drop_store
from hicache_ray.testing.host_pages import NumpyHostPages, PageShape
from hicache_ray.testing.serving import ask, wait_for
from hicache_ray.testing.subject import StorageSubject
from hicache_ray.testing.suite_base import page_names
from tests.ray_service import config
from tests.storage_local import PAGE, LocalPool, page_key, page_of
from tests.test_faults_ranks import group_of, serve
from tests.whole_cache import Lockstep, admit

TREES = [[1] * 8 + [2] * 6, [1] * 8 + [3] * 4, [1] * 4 + [4] * 8, [5] * 10, [1] * 8 + [2] * 4 + [6] * 4]
"""Prompts that make each other's nodes split."""


def plan(*faults: dict[str, Any]) -> FaultPlan:
    return FaultPlan.parse({"faults": list(faults)})


# -- lost or unreachable L3 prefix -----------------------------------------------------------------------------------


def chains(page_size: int) -> list[list[str]]:
    """Page hashes of each prompt, from its beginning."""
    return [[h.hex() for h in page_hashes(np.array(tokens, dtype="<u4"), page_size)] for tokens in TREES]


def stored_by_rank(group: Lockstep) -> dict[str, set[str]]:
    """Page hashes in the store, by the identity's digest."""
    found: dict[str, set[str]] = {group.make_store(cache.rank).config.identity.digest: set() for cache in group.caches}
    for key in group.store:
        digest, _, page_hash = key.partition("-")
        found[digest].add(page_hash)
    return found


@pytest.mark.parametrize("fault_chance", [0.0, 0.3])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("write_policy", ["write_through", "write_through_selective", "write_back"])
def test_lost_or_unreachable_l3_prefix(write_policy: str, chunked: bool, fault_chance: float) -> None:
    """Every stored page has all its ancestors stored; after a restart the whole stored prefix of a prompt is a hit."""
    group = group_of(write_policy=write_policy, fault_chance=fault_chance, device_pages=16, seed=3)
    for number in range(15):
        tokens = TREES[number % len(TREES)]
        rid = f"r{number}"
        group.step(admits=[admit(rid, tokens)])
        while not group.step(schedules=[rid]).scheduled[0].ok:
            group.settle()
        if chunked:
            group.step(chunks=[Chunk(rid, len(tokens) // 2)])
        group.step(finishes=[Finish(rid)])
        if number % 3:
            group.settle()
    group.settle()
    stored = stored_by_rank(group)
    for pages in stored.values():
        for chain in chains(group.shape.page_size):
            there = [page_hash in pages for page_hash in chain]
            assert there == sorted(there, reverse=True), "a page is stored whose ancestor is not"
    if fault_chance == 0.0 and write_policy == "write_through":
        assert all(set(chain) <= pages for pages in stored.values() for chain in chains(group.shape.page_size))
    restarted = Lockstep(replace(group.shape, fault_chance=0.0), store=dict(group.store))
    for number, (tokens, chain) in enumerate(zip(TREES, chains(group.shape.page_size), strict=True)):
        wanted = chain[: (len(tokens) - 1) // group.shape.page_size]
        leading = min(next((n for n, h in enumerate(wanted) if h not in p), len(wanted)) for p in stored.values())
        assert serve(restarted, f"again{number}", tokens) >= leading * group.shape.page_size


def test_lost_or_unreachable_l3_prefix_a_store_that_comes_late() -> None:
    """It is attached to a tree with host copies; what is extended then takes its ancestors along (D5)."""
    group = group_of(storage=False)
    serve(group, "early", TREES[0])
    for _ in range(2):
        group.step(controls=[Control("attach", {"backend": "faulty"})])
    serve(group, "late", TREES[0] + [7] * 4)
    hashes = [h.hex() for h in page_hashes(np.array(TREES[0] + [7] * 4, dtype="<u4"), group.shape.page_size)]
    assert all(set(hashes) <= pages for pages in stored_by_rank(group).values())


def test_lost_or_unreachable_l3_prefix_a_prefix_that_was_sent_while_the_store_was_away() -> None:
    """A system prompt never leaves the tree: it is stored with the first thing below it, once the store is back."""
    group = group_of(device_pages=40, host_pages=60)
    system = list(range(8))
    away = plan({"kind": "drop", "who": "rank 0", "point": "storage.store", "times": 0})
    with injected(away):
        serve(group, "first", system)
        serve(group, "second", [*system, 20, 21])
    assert not group.store
    for cache in group.caches:
        guard = cache.mover.storage_io.storage  # type: ignore[union-attr]
        guard.breakers["write"].succeeded()
    serve(group, "third", [*system, 30, 31])
    hashes = [h.hex() for h in page_hashes(np.array([*system, 30, 31], dtype="<u4"), group.shape.page_size)]
    assert all(set(hashes) == pages for pages in stored_by_rank(group).values())


# -- wrong bytes under a right key; key too narrow -------------------------------------------------------------------


def test_wrong_bytes_under_a_right_key_key_too_narrow() -> None:
    """Changing any one field of a model's identity, or of a namespace, changes the key; fields can't be confused."""
    base = ModelIdentity("m", "r", "bf16", tp_size=4, pp_size=4, dp_size=4, layer_end=4)
    other = {"model": "r", "revision": "m", "kv_dtype": "fp8", "page_size": 2, "layout": "page_first"}
    other |= {"key_mode": "bigram", "attention": "mla"} | dict.fromkeys(("heads", "head_dim"), 1)
    digests = {base.digest}
    for field in fields(ModelIdentity):
        value = other[field.name] if field.name in other else getattr(base, field.name) + 1
        digests.add(replace(base, **{field.name: value}).digest)
    assert len(digests) == 1 + len(fields(ModelIdentity))
    assert ModelIdentity("ab", "c").digest != ModelIdentity("a", "bc").digest
    spaces = [Namespace(*values) for values in (("a",), (None, "a"), (None, None, "a"), ("a", "a"), (), ("",))]
    assert len({page_hashes(np.arange(4, dtype="<u4"), 4, namespace=space)[0] for space in spaces}) == len(spaces)


@pytest.mark.parametrize("use_shm", [True, False])
@pytest.mark.parametrize("point", ["page.arena", "page.answered", "page.sent"])
def test_wrong_bytes_under_a_right_key_one_flipped_byte(tmp_path: Path, point: str, use_shm: bool) -> None:
    """In the arena or on the way to another node: a miss, and the page can be stored again."""
    pool = LocalPool(tmp_path, names=("a",))
    client = pool.client(use_shm=use_shm)
    keys, pages = [page_key(n) for n in range(8)], [page_of(n) for n in range(8)]
    who = "rank 0" if point == "page.sent" else "storage 0"
    flips = plan({"kind": "corrupt", "who": who, "point": point})
    with injected(flips, who) as injector:
        stored = client.store(keys, pages, b"", Deadline(5))
        arrived = [np.zeros(PAGE, np.uint8) for _ in keys]
        done = client.load(keys, arrived, Deadline(5))
        happened = len(injector.firings)
    reaches = {"page.arena": True, "page.answered": not use_shm, "page.sent": not use_shm}[point]
    assert happened == int(reaches) and (stored == done == 8) is not reaches
    assert all(np.array_equal(arrived[number], pages[number]) for number in range(done))
    assert client.store(keys, pages, b"", Deadline(5)) == client.load(keys, arrived, Deadline(5)) == 8
    assert all(np.array_equal(one, other) for one, other in zip(arrived, pages, strict=True))
    pool.check()


# -- keys differ between processes -----------------------------------------------------------------------------------

KEYS = """
import numpy as np
from hicache_ray.hashing import Namespace, page_hashes, storage_key
from hicache_ray.hashing import ModelIdentity
identity = ModelIdentity("org/m", "main", "bfloat16", 4, tp_rank=1, tp_size=2)
hashes = page_hashes(np.arange(12, dtype="<u4"), 4, namespace=Namespace("adapter", "salt", "tenant"))
print(*[storage_key(identity.digest, page_hash.hex()) for page_hash in hashes])
"""


def test_keys_differ_between_processes() -> None:
    """The same from three interpreters with different hash seeds, and as ever: these are golden."""
    outputs = set()
    for seed in ("0", "1", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        outputs.add(
            subprocess.run([sys.executable, "-c", KEYS], env=environment, capture_output=True, check=True).stdout
        )
    (keys,) = outputs
    assert [key[:45] for key in keys.decode().split()] == GOLDEN


GOLDEN = [
    "a14a5b23114080edeb536fbe13dfcc64-1eac1b3b0805",
    "a14a5b23114080edeb536fbe13dfcc64-01b6118ca8fa",
    "a14a5b23114080edeb536fbe13dfcc64-70b3b982a35f",
]


# -- lookup says yes, read says no -----------------------------------------------------------------------------------


@pytest.mark.parametrize("lost_at", range(6))
@pytest.mark.parametrize("ranks_that_lose", [(0,), (1,), (0, 1)], ids=str)
def test_lookup_says_yes_read_says_no(lost_at: int, ranks_that_lose: tuple[int, ...]) -> None:
    """Between the two a page is evicted, on some ranks: the prefix ends there on all, the rest is recomputed."""
    group = group_of()
    prompt = list(range(13))
    serve(group, "before", prompt)
    fresh = Lockstep(group.shape, store=group.store)
    fresh.step(admits=[admit("r", prompt)])
    for worker in fresh.workers:
        if worker.name == "l3-query":
            worker.advance(worker.pending)
    fresh.step(polls=["r"])
    gone = page_hashes(np.array(prompt, dtype="<u4"), group.shape.page_size)[lost_at]
    for rank in ranks_that_lose:
        del group.store[fresh.make_store(rank).storage_key(gone)]
    for worker in fresh.workers:
        worker.advance(worker.pending)
    assert fresh.step(polls=["r"]).polled[0].ready
    (row,) = fresh.step(schedules=["r"]).scheduled
    assert (row.storage_tokens, row.computed_tokens) == (2 * lost_at, 13 - 2 * lost_at)
    fresh.step(finishes=[Finish("r")])
    fresh.settle()


# -- backend errors --------------------------------------------------------------------------------------------------

PROMPTS = [np.arange(24, dtype="<u4") + 100 * number for number in range(8)]


@pytest.fixture
def memory_group() -> Iterator[LocalGroup]:
    """Two ranks with real threads over a store in memory; L1 and L2 hold a few of the prompts."""
    settings = config(
        hicache_storage_backend="memory", hicache_ratio=2.0, storage_timeout=0.5, prefetch_timeout_base=0.2
    )
    group = LocalGroup.create(settings.resolve().config, engine=ENGINE, storage_options={"store": "faults"})
    yield group
    group.stop()
    drop_store("faults")


@pytest.mark.parametrize("fault", ["drop", "oom", "short_read", "stale_exists", "slow", "hang"])
@pytest.mark.parametrize("call", ["lookup", "load", "store"])
def test_backend_errors(memory_group: LocalGroup, fault: str, call: str) -> None:
    """Raises, lies, is late or never comes back: every request is served with right bytes, nothing is kept from its
    owner, and afterwards the store is used again."""
    usual = {"short_read": "load", "stale_exists": "lookup"}.get(fault, call)
    if usual != call:
        pytest.skip(f"{fault} is of {usual}")
    for prompt in PROMPTS:
        ask(memory_group, prompt)
    settle(memory_group)
    seconds = {"slow": 0.05, "hang": 1.5}.get(fault)
    broken = plan({"kind": fault, "who": "rank 0", "point": f"storage.{call}", "times": 4, "seconds": seconds})
    with injected(broken) as injector:
        for prompt in PROMPTS:
            ask(memory_group, prompt)
        assert 0 < len(injector.firings) <= 4
    settle(memory_group)
    memory_group.check_integrity()

    def used_again() -> bool:
        return any(ask(memory_group, prompt).storage_tokens for prompt in PROMPTS)

    wait_for(used_again, "the store to be used again")  # the breaker may refuse at first
    stats = memory_group.stats()[0]
    assert all(pool["in_flight"] == 0 for pool in stats["ledger"].values())


def test_backend_errors_breaker_opens_and_closes(memory_group: LocalGroup) -> None:
    guard = memory_group.caches[0].mover.storage_io.storage  # type: ignore[union-attr]
    names = page_names(2)
    pages = np.arange(2)
    with injected(plan({"kind": "drop", "who": "rank 0", "point": "storage.load", "times": 0})) as injector:
        for _ in range(ERRORS_IN_A_ROW + 3):
            assert guard.load(names, pages) == 0
        assert len(injector.firings) == ERRORS_IN_A_ROW and guard.breakers["read"].is_open
        assert guard.store(names, pages) == 2, "writes have a breaker of their own"
    wait_for(lambda: guard.load(names, pages) == 2, "the breaker to close")
    assert not guard.breakers["read"].is_open
    assert guard.load(names, pages) == 2


# -- directory or owner lost -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_shm", [True, False])
def test_directory_or_owner_lost(tmp_path: Path, use_shm: bool) -> None:
    """An owner dies under load: its keys are misses, the others serve on, it comes back with what it had, and nothing
    stale is served: what was cleared while a client did not look is gone."""
    pool = LocalPool(tmp_path, names=("a", "b", "c"))
    client = pool.client(use_shm=use_shm)
    rng, numbers = random.Random(2), list(range(30))

    def put(some: list[int]) -> int:
        return client.store([page_key(n) for n in some], [page_of(n) for n in some], b"", Deadline(5))

    def get(number: int) -> bool:
        page = np.zeros(PAGE, np.uint8)
        done = client.load([page_key(number)], [page], Deadline(5))
        assert not done or np.array_equal(page, page_of(number)), "a stale page was served"
        return bool(done)

    assert put(numbers) == len(numbers)
    pool.actors["b"].kill()
    owners = pool.membership.owners([page_key(n)[16:] for n in numbers])[:, 0]
    lost = [n for n, owner in zip(numbers, owners.tolist(), strict=True) if pool.membership.members[owner] == "b"]
    for _ in range(60):
        number = rng.choice(numbers)
        assert get(number) is (number not in lost)
    pool.actors["b"].restart()
    pool.clock.now += 10
    assert all(get(number) for number in numbers)
    for actor in pool.actors.values():
        actor.service.clear()
    assert not any(get(number) for number in numbers)
    pool.check()


# -- torn or orphaned files ------------------------------------------------------------------------------------------

SHAPE = PageShape(page_size=4, layers=2, token_bytes=64)

WRITER = """
import os, signal, sys
import numpy as np
from hicache_ray.hashing import ModelIdentity
from hicache_ray.storage.file import format as file_format
from hicache_ray.storage.base import StorageConfig
from hicache_ray.storage.file.storage import FileStorage
from hicache_ray.testing.host_pages import NumpyHostPages, PageShape
folder, whole, *names = sys.argv[1:]
names = [bytes.fromhex(name) for name in names]
written = 0

def tear(descriptor, buffers):
    global written
    written += 1
    if written <= int(whole):
        return os.writev(descriptor, buffers)
    os.writev(descriptor, [memoryview(buffers[0])[:5]])
    os.kill(os.getpid(), signal.SIGKILL)

file_format.write_buffers = tear
extra = {"directory": folder + "/pages", "threads": 1, "min_free_bytes": 0}
store = FileStorage(StorageConfig(ModelIdentity("m", page_size=4, layout="page_first"), extra, timeout=30))
pool = NumpyHostPages(16, PageShape(page_size=4, layers=2, token_bytes=64))
pool.fill(range(16), 1)
store.register_host_pool(pool)
store.store(names, np.arange(len(names)))
"""
PAGES = page_names(6)


def open_files(folder: Path) -> tuple[FileStorage, NumpyHostPages]:
    subject = StorageSubject("file", {"directory": str(folder / "pages"), "threads": 1, "min_free_bytes": 0})
    store = subject.make(folder, ModelIdentity("m", page_size=4, layout="page_first"))
    assert isinstance(store, FileStorage)
    pool = NumpyHostPages(16, SHAPE)
    pool.fill(range(16), 1)
    store.register_host_pool(pool)
    return store, pool


@pytest.mark.parametrize("whole", [0, 2, 5])
def test_torn_or_orphaned_files(tmp_path: Path, whole: int) -> None:
    """kill -9 in the middle of a write: no torn page is visible afterwards, what was left lying about is swept."""
    command = [sys.executable, "-c", WRITER, str(tmp_path), str(whole), *[name.hex() for name in PAGES]]
    killed = subprocess.run(command, capture_output=True, timeout=300)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    store, pool = open_files(tmp_path)
    there = store.lookup(PAGES)
    assert there <= whole
    assert store.load(PAGES, np.arange(8, 14)) == there
    assert all(np.array_equal(pool.read(page), pool.read(page + 8)) for page in range(there))
    assert store.store(PAGES, np.arange(6)) == 6
    store.close()
    again, _ = open_files(tmp_path)
    names = [path.name for path in (tmp_path / "pages").rglob("*") if path.is_file()]
    assert not [name for name in names if name.endswith(".tmp")]
    again.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("call", ["write", "read"])
def test_torn_or_orphaned_files_errors_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, call: str
) -> None:
    store, pool = open_files(tmp_path)
    if call == "read":
        store.store(PAGES, np.arange(6))

    def fails(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(file_format, f"{call}_buffers", fails)
        calls = {"write": store.store, "read": store.load}
        assert calls[call](PAGES, np.arange(6)) == 0
        assert store.get_stats().errors > 0
    assert store.store(PAGES, np.arange(6)) == 6
    assert store.load(PAGES, np.arange(8, 14)) == 6
    store.close()


def test_torn_or_orphaned_files_a_flipped_byte(tmp_path: Path) -> None:
    store, pool = open_files(tmp_path)
    with injected(plan({"kind": "corrupt", "who": "rank 0", "point": "page.file", "call": 3})):
        assert store.store(PAGES, np.arange(6)) == 6
    assert store.load(PAGES, np.arange(8, 14)) == 2
    assert store.get_stats().corrupt == 1
    assert store.store(PAGES, np.arange(6)) == 6
    assert store.load(PAGES, np.arange(8, 14)) == 6
    store.close()
