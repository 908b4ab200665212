"""The reduction of a step over real Ray actors: right, bounded when a rank fails, and joined again after that.

"Ranks desynchronise and hang" in docs/reliability.md; docs/design.md 4 and 7.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from hicache_ray.actors.collective import FRAME, ReductionGroup, generation_name
from hicache_ray.actors.gloo import list_keys, time_left
from hicache_ray.deadline import Deadline
from tests.cluster import shared_cluster
from tests.collective_ray import Pool, enter, failure, get, join, reduce, wait_for
from tests.processes import stop

pytestmark = pytest.mark.ray

LONG = 300.0
"""A reduction timeout no test waits for: who is freed before it was freed by a peer's close."""


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with shared_cluster():
        yield Pool(spare=4)


@pytest.fixture
def take(pool: Pool) -> Iterator[Callable[[int], list]]:
    """Hands out rank processes; the test may kill them."""
    yield pool.take
    pool.give_back()


@pytest.fixture
def group(request: pytest.FixtureRequest) -> str:
    """A group name of the test's own."""
    return "group-" + re.sub(r"\W+", "-", request.node.name)


def keys() -> list[str]:
    return list_keys("collective/")


@pytest.mark.parametrize("size", [2, 3, 4])
def test_min_over_ranks_is_right_for_every_length(take, group, size):
    members = take(size)
    join(members, group)
    rng = np.random.default_rng(size)
    for length in (0, 1, 12, FRAME - 3, FRAME - 2, FRAME - 1, 2 * FRAME - 2, 2 * FRAME - 1, 3 * FRAME + 7):
        vectors = rng.integers(-(2**63), 2**63 - 1, (size, length), dtype=np.int64)
        expected = vectors.min(axis=0).tolist()
        assert reduce(members, group, vectors.tolist()) == [expected] * size
    assert keys() == []


def test_many_reductions_in_a_row_do_not_mix(take, group):
    members = take(4)
    join(members, group)
    refs = [[rank.reduce.remote(group, [step, -step, at]) for step in range(200)] for at, rank in enumerate(members)]
    expected = [[step, -step, 0] for step in range(200)]
    assert [get(answers) for answers in refs] == [expected] * 4


def test_one_rank_reduces_alone():
    group = ReductionGroup.join("alone", 0, rank=0, world_size=1)
    vector = np.array([3, -4])
    reduced = group.allreduce_min(vector)
    assert reduced.tolist() == [3, -4] and reduced is not vector
    group.close()


@pytest.mark.parametrize("size, victim", [(2, 0), (2, 1), (4, 0), (4, 3)])
def test_a_rank_killed_in_a_reduction_frees_the_others_and_the_next_generation_works(take, group, size, victim):
    members = take(size)
    join(members, group, timeout=LONG)
    survivors = [rank for at, rank in enumerate(members) if at != victim]
    waiting = enter(survivors, group)
    os.kill(get(members[victim].pid.remote()), signal.SIGKILL)
    for at, ref in zip([at for at in range(size) if at != victim], waiting, strict=True):
        assert f"reduction failed on rank {at} of group {group}:0: " in failure(ref)

    members[victim] = take(1)[0]
    join(members, group, generation=1)
    assert reduce(members, group, [[at, -at] for at in range(size)]) == [[0, 1 - size]] * size
    assert keys() == []


def test_a_rank_killed_while_it_waits_itself(take, group):
    """Rank 3 dies inside; rank 2 never comes; ranks 0 and 1 end at the deadline or before."""
    members = take(4)
    join(members, group, timeout=2.0)
    waiting = enter([members[0], members[1], members[3]], group)
    os.kill(get(members[3].pid.remote()), signal.SIGKILL)
    for ref in waiting[:2]:
        assert "reduction failed on rank" in failure(ref)


@pytest.mark.parametrize("size, victim", [(2, 1), (3, 0), (3, 2)])
def test_a_stopped_peer_is_given_up_at_the_deadline(take, group, size, victim):
    members = take(size)
    join(members, group, timeout=1.0)
    stopped = get(members[victim].pid.remote())
    stop(stopped)
    try:
        survivors = [rank for at, rank in enumerate(members) if at != victim]
        texts = [failure(rank.reduce.remote(group, [1])) for rank in survivors]
        assert any("Timed out" in text for text in texts)
        others = [*survivors, take(1)[0]]
        join(others, group, generation=1)
        assert reduce(others, group, [[at] for at in range(size)]) == [[0]] * size
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert f"{group}:0" in failure(members[victim].reduce.remote(group, [1]))


def test_ranks_that_disagree_on_the_length_all_fail(take, group):
    members = take(3)
    join(members, group, timeout=LONG)
    refs = [rank.reduce.remote(group, [1] * length) for rank, length in zip(members, (3, 4, 700), strict=True)]
    texts = [failure(ref) for ref in refs]
    assert "the ranks' vectors have different lengths, 3 to 700" in texts[0]


def test_leaving_frees_the_others_and_ends_the_group(take, group):
    members = take(3)
    join(members, group, timeout=LONG)
    waiting = enter(members[:2], group)
    get(members[2].leave.remote(group))
    for ref in waiting:
        assert "reduction failed" in failure(ref)
    assert f"rank 2 has left group {group}:0; join its next generation" in failure(members[2].reduce.remote(group, [1]))
    get(members[2].leave.remote(group))


def test_groups_of_different_shape_live_side_by_side(take, group):
    members = take(3)
    join(members, "all")
    join(members[1:], "pair")
    join(members[:2], "other", generation=7)
    for step in range(5):
        assert reduce(members, "all", [[step], [step + 1], [-step]]) == [[-step]] * 3
        assert reduce(members[1:], "pair", [[step], [9]]) == [[step]] * 2
        assert reduce(members[:2], "other", [[8], [step]]) == [[step]] * 2
    get(members[1].leave.remote("pair"))
    assert "group pair:0" in failure(members[2].reduce.remote("pair", [1]))
    assert reduce(members, "all", [[3], [4], [5]]) == [[3]] * 3


def test_a_join_that_lacks_a_rank_ends_in_time_and_leaves_no_keys(take, group):
    members = take(1)
    for rank in (0, 1):
        text = failure(members[0].join.remote("lonely", rank, rank, 2, {"join_timeout": 0.5}))
        assert f"rank {rank} of 2 could not join group lonely:{rank}: " in text and "a peer did not join" in text
    assert keys() == []


def test_a_generation_cannot_be_joined_twice_by_one_process(take, group):
    members = take(2)
    join(members, group)
    assert f"rank 0 is already in group {group}:0" in failure(members[0].join.remote(group, 0, 0, 2, {}))
    assert reduce(members, group, [[1], [2]]) == [[1], [1]]


def test_keys_of_a_rank_that_died_while_joining_are_deleted(take, group):
    dead, *members = take(3)
    dead.join.remote("g/with:signs", 4, 1, 2, {})
    wait_for(lambda: bool(keys()))
    os.kill(get(dead.pid.remote()), signal.SIGKILL)
    join(members, "g/with:signs", generation=5)
    assert keys() == []

    dead = take(1)[0]
    dead.join.remote("last", 0, 1, 2, {})
    wait_for(lambda: bool(keys()))
    os.kill(get(dead.pid.remote()), signal.SIGKILL)
    assert all(key.startswith("collective/last:0/") for key in keys())
    join(members, "las", generation=1)
    assert keys() and all(key.startswith("collective/last:0/") for key in keys())
    join(members, "last", generation=1)
    assert keys() == []


def test_stock_gloo_reduces_and_its_next_generation_works(take, group):
    members = take(2)
    join(members, group, backend="gloo", timeout=2.0)
    assert reduce(members, group, [list(range(600)), [7] * 600]) == [[min(at, 7) for at in range(600)]] * 2
    waiting = enter(members[:1], group)
    os.kill(get(members[1].pid.remote()), signal.SIGKILL)
    assert f"reduction failed on rank 0 of group {group}:0" in failure(waiting[0])
    members[1] = take(1)[0]
    join(members, group, generation=1, backend="gloo")
    assert reduce(members, group, [[1, 5], [2, 4]]) == [[1, 4]] * 2


def use_ray_api(rank: int) -> list:
    """Every operation of ray.util.collective over the backend, as any user of Ray would call it."""
    from ray.util import collective

    from hicache_ray.actors.gloo import RAY_BACKEND, register

    register()
    register()
    collective.init_collective_group(2, rank, RAY_BACKEND, "public")
    mine = np.array([rank + 1, 10 * (rank + 1)], dtype=np.int64)
    summed, reduced, sent = mine.copy(), mine.copy(), mine.copy()
    collective.allreduce(summed, "public")
    collective.reduce(reduced, 0, "public", op=collective.types.ReduceOp.MAX)
    if rank == 0:
        collective.send(sent, 1, "public")
    else:
        collective.recv(sent, 0, "public")
    root = mine.copy()
    collective.broadcast(root, 1, "public")
    gathered = [np.zeros(2, dtype=np.int64) for _ in range(2)]
    collective.allgather(gathered, mine, "public")
    share = np.zeros(2, dtype=np.int64)
    collective.reducescatter(share, [mine.copy(), 2 * mine], "public")
    collective.barrier("public")
    collective.destroy_collective_group("public")
    results = [summed, reduced if rank == 0 else None, sent, root, *gathered, share]
    return [None if array is None else array.tolist() for array in results]


def test_the_backend_serves_rays_own_collective_interface(take, group):
    members = take(2)
    first, second = get([rank.call.remote(use_ray_api, at) for at, rank in enumerate(members)])
    assert first == [[3, 30], [2, 20], [1, 10], [2, 20], [1, 10], [2, 20], [3, 30]]
    assert second == [[3, 30], None, [1, 10], [2, 20], [1, 10], [2, 20], [6, 60]]
    assert keys() == []


@pytest.mark.parametrize(
    "options, text",
    [
        ({"backend": "mpi"}, "collective backend is 'mpi'; use one of hicache, gloo, nccl"),
        ({"rank": 2}, "rank is 2 of world size 2"),
    ],
    ids=["backend", "rank"],
)
def test_impossible_joins_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        ReductionGroup.join("g", 0, **{"rank": 0, "world_size": 2, **options})


def test_names_of_generations_are_no_prefixes_of_other_groups():
    assert generation_name("a", 1) == "a:1"
    assert generation_name("a:1", 2) == "a%3A1:2"
    assert generation_name("a/b", 0) == "a%2Fb:0"


def test_what_is_already_there_can_be_taken_after_the_deadline():
    assert time_left(Deadline(-1.0)).total_seconds() == 0.001
    assert 1.0 < time_left(Deadline(60.0)).total_seconds() <= 60.0
