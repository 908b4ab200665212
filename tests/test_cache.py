"""One rank through its steps: chunked prefill, peeks, accounting, refusals."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from hicache_ray.hashing import Namespace
from hicache_ray.rank.request import RequestError
from hicache_ray.rank.step import NEXT_STEP, Admit, Chunk, Finish, Peek, ProtocolError, StepRequest
from tests.whole_cache import Lockstep, Shape, admit, tokens_of


def group(**changes: object) -> Lockstep:
    shape = Shape(ranks=1, device_pages=40, host_pages=60, prefetch_policy="wait_complete")
    for name, value in changes.items():
        setattr(shape, name, value)
    return Lockstep(shape)


def run(ranks: Lockstep, rid: str, tokens: list[int], **options: object) -> None:
    """Admits, schedules and finishes one request."""
    ranks.step(admits=[admit(rid, tokens, **options)], schedules=[rid])  # type: ignore[arg-type]
    ranks.step(finishes=[Finish(rid)])


def test_chunks_are_shared_while_the_request_runs_and_begin_no_write() -> None:
    """Case 22 (chunked): never backed before the end, no hit counted; others may use the computed part."""
    ranks = group()
    ranks.step(admits=[admit("long", list(range(20)))], schedules=["long"])
    (chunked,) = ranks.step(chunks=[Chunk("long", 11)]).chunked
    assert chunked.kept_tokens == 10
    index = ranks.caches[0].index
    assert not index.transfers.writes and all(node.hit_count == 0 for node in index.tree.nodes())
    answer = ranks.step(admits=[admit("other", list(range(20)))], schedules=["other"])
    assert answer.scheduled[0].device_tokens == 10
    ranks.step(finishes=[Finish("other"), Finish("long")])
    assert index.transfers.writes
    ranks.settle()
    assert ranks.caches[0].ledger()["device"].in_flight == 0


def test_a_chunk_that_another_request_entered_first_is_given_back() -> None:
    ranks = group()
    ranks.step(admits=[admit("a", list(range(20))), admit("b", list(range(20)))], schedules=["a", "b"])
    ranks.step(chunks=[Chunk("a", 12), Chunk("b", 16)])
    running = ranks.caches[0].requests
    assert np.array_equal(running["a"].pages[:6], running["b"].pages[:6])
    ranks.step(finishes=[Finish("a"), Finish("b")])
    ranks.settle()


def test_peek_changes_nothing() -> None:
    """LPM scheduling looks prompts up without refreshing or splitting them."""
    ranks = group()
    run(ranks, "r", list(range(10)))
    ranks.settle()
    before = ranks.caches[0].index.tree.digest()
    for tokens, expected in ((list(range(10)), 8), (list(range(5)), 4), ([9, 9], 0)):
        answer = ranks.step(peeks=[Peek(tokens_of(tokens))])
        assert (answer.peeked[0].device_tokens, answer.peeked[0].host_tokens) == (expected, 0)
    assert ranks.step(peeks=[Peek(tokens_of(list(range(10))), Namespace("x"))]).peeked[0].device_tokens == 0
    assert ranks.caches[0].index.tree.digest() == before


@pytest.mark.parametrize("policy", ["best_effort", "wait_complete", "timeout"])
def test_case_64_tokens_by_source_add_up_and_count_what_was_really_loaded(policy: str) -> None:
    """Case 64: storage = what the prefetch brought and the load back loaded, host = the rest, never more."""
    ranks = group(prefetch_policy=policy, device_pages=9, host_pages=18)
    prompts = [[n] * 2 + list(range(14)) for n in range(6)]
    for n, prompt in enumerate(prompts):
        run(ranks, f"r{n}", prompt)
        ranks.settle()
    ranks.step(admits=[admit("again", prompts[0])])
    for worker in ranks.workers:
        worker.advance(worker.pending)
    ranks.step()
    for worker in ranks.workers:
        worker.advance(worker.pending)
    ranks.clock.now += 5
    polled = ranks.step(polls=["again"]).polled[0]
    assert polled.ready and polled.storage_tokens == 14
    (scheduled,) = ranks.step(schedules=["again"]).scheduled
    assert (scheduled.device_tokens, scheduled.host_tokens) == (0, 0)
    assert (scheduled.storage_tokens, scheduled.computed_tokens) == (14, 2)


@pytest.mark.parametrize(
    ("step", "text"),
    [
        ({"polls": ["x"]}, "poll: request 'x' is unknown"),
        ({"schedules": ["run"]}, "schedule: request 'run' is running"),
        ({"finishes": [Finish("wait")]}, "finish: request 'wait' is waiting"),
        ({"chunks": [Chunk("wait", 2)]}, "chunk: request 'wait' is waiting"),
        ({"admits": [admit("run", [1, 2])]}, "'run' is running"),
        ({"admits": [admit("huge", [1] * 81)]}, "needs 81 tokens of L1, which has 80"),
        ({"admits": [admit("huge", [1], new=80)]}, "needs 81 tokens"),
    ],
)
def test_what_can_not_be_done_is_refused_before_anything_changes(step: dict[str, object], text: str) -> None:
    ranks = group()
    ranks.step(admits=[admit("run", [1, 2, 3]), admit("wait", [4, 5, 6])], schedules=["run"])
    before = ranks.caches[0].index.tree.digest()
    with pytest.raises(RequestError, match=text):
        ranks.step(aborts=["wait"] if "admits" in step else [], **step)  # type: ignore[arg-type]
    assert ranks.caches[0].index.tree.digest() == before and set(ranks.caches[0].requests) == {"run", "wait"}


@pytest.mark.parametrize(
    ("step", "text"),
    [
        ({"schedules": ["wait", "wait"]}, "schedules: request 'wait' is named 2 times"),
        ({"finishes": [Finish("run"), Finish("run")]}, "aborts and finishes: request 'run' is named 2 times"),
        ({"aborts": ["run"], "finishes": [Finish("run")]}, "aborts and finishes: request 'run'"),
        ({"aborts": ["run"], "chunks": [Chunk("run", 2)]}, "chunk: request 'run' ends in the same step"),
        ({"finishes": [Finish("run")], "chunks": [Chunk("run", 2)]}, "chunk: request 'run' ends"),
        ({"aborts": ["wait"], "polls": ["wait"]}, "poll: request 'wait' ends in the same step"),
        ({"aborts": ["wait"], "schedules": ["wait"]}, "schedule: request 'wait' ends"),
        ({"admits": [admit("new", [1]), admit("new", [2])]}, "admits: request 'new' is named 2 times"),
        ({"chunks": [Chunk("run", 1), Chunk("run", 2)]}, "chunks: request 'run' is named 2 times"),
        ({"admits": [Admit("less", b"", max_new_tokens=-5)]}, "max_new_tokens: expected int >= 0, got -5"),
        ({"admits": [Admit("", b"")]}, "rid: expected str of length >= 1, got ''"),
    ],
)
def test_a_step_that_contradicts_itself_is_refused_whole(step: dict[str, object], text: str) -> None:
    ranks = group()
    ranks.step(admits=[admit("run", [1, 2, 3]), admit("wait", [4, 5, 6])], schedules=["run"])
    before = ranks.caches[0].index.tree.digest()
    with pytest.raises(ValueError, match=text):
        ranks.step(**step)  # type: ignore[arg-type]
    assert ranks.caches[0].index.tree.digest() == before and set(ranks.caches[0].requests) == {"run", "wait"}
    ranks.step(finishes=[Finish("run")], aborts=["wait"])
    ranks.settle()
    assert ranks.caches[0].ledger()["device"].in_flight == 0


@pytest.mark.parametrize("where", [{"generation": 5}, {"step": 99}, {"step": 0}])
def test_a_step_from_another_point_is_refused(where: dict[str, int]) -> None:
    ranks = group()
    ranks.step()
    request = StepRequest(**({"generation": 0, "step": 1} | where))
    with pytest.raises(RequestError, match="this rank is at step 1 of generation 0"):
        ranks.caches[0].step(request)
    assert ranks.caches[0].step(StepRequest(0, NEXT_STEP)).step == 1


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ({"admits": (Admit("a", b"", None),)}, "admits.namespace: expected array, got None"),  # type: ignore[arg-type]
        ({"admits": (Admit("\ud800", b""),)}, "can't be sent"),
        ({"admits": (Admit("a", b"", priority=2**64),)}, "can't be sent"),
        ({"polls": (5,)}, "polls: expected str"),
    ],
)
def test_a_malformed_field_is_said_where_it_was_said(bad: dict[str, object], text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        StepRequest(0, 0, **bad).encode()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Admit("odd", b"abc"), "tokens: 3 bytes are no whole number of 4-byte tokens"),
        (lambda: Admit("list", [1, 2]), r"tokens: expected bytes, got \[1, 2\]"),
        (lambda: Finish("a", b"a"), "output: 1 bytes are no whole number of 4-byte tokens"),
        (lambda: Peek(b"ab"), "tokens: 2 bytes"),
    ],
)
def test_what_is_no_row_of_tokens_is_refused_where_it_is_made(make: Callable[[], object], text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        make()
