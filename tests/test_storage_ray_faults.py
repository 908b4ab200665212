"""What kills a storage pool's parts on a real Ray cluster (docs/design.md 7).

Whatever breaks, the answer is a miss, within the deadline, and what was stored is served again afterwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from hicache_ray.actors.storage_actor import StorageActorInfo
from hicache_ray.actors.storage_pool import StoragePool, StoragePoolConfig
from hicache_ray.storage.pool.options import actor_name
from hicache_ray.storage.shard.files import ProcessId
from tests.cluster import shared_cluster
from tests.conftest import REPOSITORY
from tests.processes import stop
from tests.storage_ray import SEGMENT_BYTES, Client, arena_files, wait_until

pytestmark = [pytest.mark.ray]

CONFIG = StoragePoolConfig(name="faulty", actors=2, bytes_per_actor=8 << 20, segment_bytes=SEGMENT_BYTES)
TIMEOUT = 4.0
"""Of a client's call, seconds; a call under fault must end within it."""
SLACK = 60.0
"""More than that, and it is not a busy machine that keeps a call waiting: it hangs."""


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with shared_cluster():
        yield


@pytest.fixture
def pool(cluster: None) -> Iterator[StoragePool]:
    with StoragePool.start(CONFIG) as running:
        yield running


def client_of(pool: StoragePool, **extra: object) -> Client:
    return Client(pool.handle.options(refusal_seconds=0.2, **extra), timeout=TIMEOUT)


def info_of(pool: StoragePool, member: str) -> StorageActorInfo:
    info = pool.info()[member]
    assert info is not None
    return info


@contextlib.contextmanager
def within_the_deadline() -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < TIMEOUT + SLACK


def process_of(pool: StoragePool, member: str) -> ProcessId:
    process = ProcessId.running(info_of(pool, member).pid)
    assert process is not None
    return process


def kill_process(pool: StoragePool, member: str) -> None:
    process = process_of(pool, member)
    os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: not process.alive)


def kill_by_ray(pool: StoragePool, member: str) -> None:
    process = process_of(pool, member)
    ray.kill(ray.get_actor(actor_name(member), namespace=pool.handle.namespace), no_restart=False)
    wait_until(lambda: not process.alive)


@pytest.mark.parametrize("transport", ["auto", "object_store"])
@pytest.mark.parametrize("kill", [kill_process, kill_by_ray])
def test_a_killed_actor_is_a_miss_and_comes_back_with_its_pages(
    pool: StoragePool, kill: object, transport: str
) -> None:
    client = client_of(pool, transport=transport)
    assert client.put(range(60)) == [True] * 60
    before = info_of(pool, "faulty-0")
    kill(pool, "faulty-0")  # type: ignore[operator]
    while client.exists(range(60)) < 60:
        with within_the_deadline():
            client.get(range(60))
        with within_the_deadline():
            client.put(range(60, 64))
    assert client.get(range(60)) == [True] * 60
    after = info_of(pool, "faulty-0")
    assert after.pid != before.pid and after.arena_id == before.arena_id
    assert after.reconstructed and after.reopened_pages > 10
    assert set(pool.audit(read_pages=True).values()) == {""}


def test_the_breaker_opens_and_closes(pool: StoragePool) -> None:
    client = client_of(pool)
    client.put(range(60))
    member = next(member for member in client.storage.members if member.name == "faulty-0")
    kill_process(pool, "faulty-0")
    wait_until(lambda: client.exists(range(60)) == 60 or member.breaker.is_open)
    wait_until(lambda: client.exists(range(60)) == 60)
    assert not member.breaker.is_open
    counted = client.storage.get_stats()
    assert counted.errors + counted.timeouts > 0


@pytest.mark.parametrize("transport", ["auto", "object_store"])
def test_a_hung_actor_costs_one_deadline(pool: StoragePool, transport: str) -> None:
    """SIGSTOP: no error ever comes, only silence."""
    client = client_of(pool, transport=transport)
    client.put(range(60))
    pid = info_of(pool, "faulty-1").pid
    stop(pid)
    try:
        with within_the_deadline():
            assert client.get(range(60)) != [True] * 60
        with within_the_deadline():
            assert client.exists(range(60)) < 60
        with within_the_deadline():
            assert client.put(range(100, 160)) != [True] * 60
        counted = client.storage.get_stats()
        assert counted.timeouts >= 1 and counted.refused + counted.timeouts >= 3
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: client.get(range(60)) == [True] * 60)
    assert client.put(range(100, 160)) == [True] * 60


def test_replicas_survive_the_loss_of_a_member_and_its_arena(cluster: None) -> None:
    with StoragePool.start(dataclasses.replace(CONFIG, name="twice", replicas=2)) as pool:
        client = client_of(pool)
        assert client.put(range(60)) == [True] * 60
        info = info_of(pool, "twice-0")
        Path(info.path).unlink()
        kill_process(pool, "twice-0")
        assert client.get(range(60)) == [True] * 60 and client.exists(range(60)) == 60
        wait_until(lambda: pool.info()["twice-0"] is not None)
        assert info_of(pool, "twice-0").reopened_pages == 0
        wait_until(lambda: client.put(range(60)) == [True] * 60 and pool_pages(pool) == 120)
        assert client.get(range(60)) == [True] * 60


def pool_pages(pool: StoragePool) -> int:
    return sum(stats.pages for stats in pool.stats().values() if stats is not None)


def test_what_a_killed_client_held_is_given_back(cluster: None) -> None:
    """It dies between reserve and commit, and between acquire and release."""

    @ray.remote(num_cpus=0, max_restarts=0)
    class Dying:
        def die(self, extra: dict) -> None:
            from hicache_ray.storage.shard import page_copy

            def end(copier: object, copy: object, targets: list, sources: list) -> list[int]:
                if targets:
                    os._exit(1)
                return []

            page_copy.Copier.run = end  # type: ignore[method-assign,assignment]
            client = Client(extra)
            for _ in range(60):  # a busy machine may make a call a miss, of which nothing is copied
                client.get(range(10))
                client.put(range(20, 30))

    config = dataclasses.replace(CONFIG, name="brief", actors=1, lease_seconds=2.0)
    with StoragePool.start(config) as pool:
        client = client_of(pool)
        client.put(range(10))
        for first_call in ("get", "put"):
            if first_call == "put":
                pool.clear()
            with pytest.raises(ray.exceptions.RayActorError):
                ray.get(Dying.remote().die.remote(pool.handle.options()), timeout=300)

        def given_back() -> bool:
            stats = pool.stats()["brief-0"]
            return stats is not None and stats.leased == stats.reserved == 0 and stats.abandoned == 2

        wait_until(given_back)
        assert client.exists(range(20, 30)) == 0
        assert set(pool.audit(read_pages=True).values()) == {""}


def test_an_actor_that_is_killed_for_good(pool: StoragePool) -> None:
    client = client_of(pool)
    client.put(range(60))
    ray.kill(ray.get_actor(actor_name("faulty-0"), namespace=pool.handle.namespace), no_restart=True)
    for _ in range(3):
        with within_the_deadline():
            client.get(range(60))
    pool.remove_member("faulty-0")
    wait_until(lambda: client.put(range(60)) == [True] * 60)
    assert client.get(range(60)) == [True] * 60


DRIVER = """
    import sys
    import ray
    ray.init(address={address!r}, namespace="storage-test", log_to_driver=False, configure_logging=False)
    from hicache_ray.actors.storage_pool import StoragePool, StoragePoolConfig
    from tests.storage_ray import Client
    pool = StoragePool.start(StoragePoolConfig(name="driven", bytes_per_actor=1 << 20, detached={detached}))
    assert Client(pool.handle.options()).put(range(8)) == [True] * 8
    print("ready", flush=True)
    sys.stdin.readline()
"""


@contextlib.contextmanager
def driver(*, detached: bool) -> Iterator[subprocess.Popen[str]]:
    """Another driver of this cluster that has started a pool."""
    code = DRIVER.format(address=ray.get_runtime_context().gcs_address, detached=detached)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_driver_that_ends_takes_its_pool_along(cluster: None) -> None:
    with driver(detached=False) as process:
        assert len(arena_files("-driven-")) == 1
        process.communicate("\n", timeout=60)
        assert process.returncode == 0
    assert not arena_files("-driven-")


def test_what_a_killed_driver_leaves_is_swept_at_the_next_start(cluster: None) -> None:
    with driver(detached=False) as process:
        process.kill()
        process.wait()
    assert len(arena_files("-driven-")) == 1

    def swept() -> bool:
        # Not before Ray has ended the dead driver's actor.
        StoragePool.start(dataclasses.replace(CONFIG, name="sweeper", actors=1)).stop()
        return not arena_files("-driven-")

    wait_until(swept)
    with driver(detached=False) as process:
        process.communicate("\n", timeout=60)
    assert not arena_files("-driven-"), "the name is free again"


def test_a_detached_pool_outlives_its_driver(cluster: None) -> None:
    with driver(detached=True) as process:
        process.communicate("\n", timeout=60)
    pool = StoragePool.connect("driven")
    try:
        client = client_of(pool)
        assert client.get(range(8)) == [True] * 8
        kill_process(pool, "driven-0")
        wait_until(lambda: client.get(range(8)) == [True] * 8)
        assert pool.add_member() == "driven-1"
    finally:
        pool.stop()
    assert not arena_files(pool.membership.token)


LOST_ANSWERS = """
    import os
    os.environ["RAY_testing_rpc_failure"] = {failures!r}
    from tests.cluster import own_cluster
    from tests.storage_ray import Client, wait_until
    from hicache_ray.actors.storage_pool import StoragePool, StoragePoolConfig
    with own_cluster():
        with StoragePool.start(StoragePoolConfig(name="lossy", bytes_per_actor=8 << 20, lease_seconds=2.0)) as pool:
            client = Client(pool.handle.options(transport="object_store", refusal_seconds=0.05))
            for start in range(0, 60, 10):
                wait_until(lambda: client.put(range(start, start + 10)) == [True] * 10)
                wait_until(lambda: client.get(range(start, start + 10)) == [True] * 10)
            counted = client.storage.get_stats()
            assert counted.errors + counted.timeouts > 0, counted
            def settled():
                stats = pool.stats()["lossy-0"]
                return stats is not None and stats.reserved == 0 and stats.pages == 60
            wait_until(settled)
            wait_until(lambda: pool.audit(read_pages=True) == {{"lossy-0": ""}})
    print("passed")
"""


@pytest.mark.chaos
@pytest.mark.parametrize("kind", ["req_failure_prob", "resp_failure_prob"])
def test_calls_whose_request_or_answer_is_lost(kind: str) -> None:
    """They may have run: what is tried again then is stored once, and nothing stays reserved."""
    probabilities = {"req_failure_prob": 0, "resp_failure_prob": 0, "in_flight_failure_prob": 0, kind: 50}
    failures = json.dumps({"CoreWorkerService.grpc_client.PushTask": {"num_failures": 8, **probabilities}})
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LOST_ANSWERS.format(failures=failures))],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.stdout == "passed\n", done.stderr[-3000:]
