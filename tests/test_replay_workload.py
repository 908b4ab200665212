"""Workloads: the chat generator, token ids of trace blocks, and traces of real text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hicache_ray.replay.chat import ChatSpecError
from hicache_ray.replay.traces import TraceError, block_token_ids, load_workload


def test_chat_conversations_grow_by_their_own_answers() -> None:
    workload = load_workload("chat:sessions=7,turns=4,system=100,turn=20,answer=10")
    requests = {request.rid: request for request in workload}
    assert len(requests) == workload.total == 28
    for request in requests.values():
        assert np.array_equal(request.prompt[:100], requests["s0t0"].prompt[:100])
        if request.after is not None:
            before = requests[request.after]
            history = np.concatenate([before.prompt, before.output])
            assert np.array_equal(request.prompt[: len(history)], history)
            assert 10 <= len(request.prompt) - len(history) <= 30


def test_chat_turns_come_in_order_and_sessions_interleave() -> None:
    rids = [request.rid for request in load_workload("chat:sessions=10,turns=5")]
    for session in range(10):
        mine = [rid for rid in rids if rid.startswith(f"s{session}t")]
        assert mine == [f"s{session}t{turn}" for turn in range(5)]
    assert rids[:5] != sorted(rids[:5])


def test_a_workload_repeats_and_follows_its_seed() -> None:
    workload = load_workload("chat:sessions=3,turns=2", seed=1)
    once, twice = [[r.prompt.tobytes() for r in workload] for _ in range(2)]
    assert once == twice
    assert once != [r.prompt.tobytes() for r in load_workload("chat:sessions=3,turns=2", seed=2)]
    assert once == [r.prompt.tobytes() for r in load_workload("chat:sessions=3,turns=2,seed=1", seed=5)]


def test_tenants_have_equal_prompts_in_different_namespaces() -> None:
    workload = load_workload("chat:sessions=4,turns=1,tenants=2,system=64")
    assert {request.namespace.tenant for request in workload} == {"tenant0", "tenant1"}
    assert len({request.prompt[:64].tobytes() for request in workload}) == 1


def test_limit_takes_the_first_requests() -> None:
    whole = [request.rid for request in load_workload("chat")]
    assert len(whole) == 300
    assert [request.rid for request in load_workload("chat:", limit=5)] == whole[:5]


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("chat:sessions=0", "sessions=0"),
        ("chat:turns=x", "'x' is no whole number"),
        ("chat:turns=", "'' is no whole number"),
        ("chat:nonsense=1", "expected name=number with one of sessions, turns"),
        ("chat:turns", "expected name=number"),
        ("chat:turns=1,turns=2", "given twice"),
        ("chat:seed=-1", "seed=-1"),
        ("chat:turn=99999999999", "turn=99999999999"),
    ],
)
def test_a_bad_chat_spec_is_named(spec: str, reason: str) -> None:
    with pytest.raises(ChatSpecError) as caught:
        load_workload(spec)
    assert reason in str(caught.value)


def test_distinct_blocks_share_no_token() -> None:
    tokens = block_token_ids(np.arange(1000, dtype=np.uint32), 512, seed=3)
    assert len(np.unique(tokens)) == 512_000
    again = block_token_ids(np.array([7], dtype=np.uint32), 512, seed=3)
    assert np.array_equal(again, tokens[7 * 512 : 8 * 512])


def trace(folder: Path, *requests: tuple[int, int, list[int]]) -> str:
    """Path of a Mooncake trace with (input_length, output_length, hash_ids) rows."""
    path = folder / "trace.jsonl"
    rows = [{"timestamp": 0, "input_length": i, "output_length": o, "hash_ids": ids} for i, o, ids in requests]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_prompts_of_a_trace_share_what_its_blocks_share(tmp_path: Path) -> None:
    source = trace(tmp_path, (1100, 5, [90, 10**18, 3]), (1500, 0, [90, 10**18, 4]))
    workload = load_workload(source)
    first, second = workload
    assert (len(first.prompt), len(first.output), len(second.prompt), len(second.output)) == (1100, 5, 1500, 0)
    assert np.array_equal(first.prompt[:1024], second.prompt[:1024])
    assert not np.isin(first.prompt[1024:], second.prompt).any()
    assert workload.blocks is not None
    assert workload.blocks.unique == 4
    assert [request.blocks.tolist() for request in workload.blocks.requests] == [[0, 1, 2], [0, 1, 3]]


def test_smaller_blocks_scale_a_trace_down(tmp_path: Path) -> None:
    source = trace(tmp_path, (1100, 512, [0, 1, 2]), (1024, 1, [0, 1]))
    first, second = load_workload(source, block_tokens=16)
    assert (len(first.prompt), len(first.output), len(second.prompt), len(second.output)) == (35, 16, 32, 1)
    assert np.array_equal(first.prompt[:32], second.prompt)


def test_tau_bench_turns_grow_their_conversation(shared: Path) -> None:
    workload = load_workload(str(shared / "traces" / "tau_bench_airline.jsonl.xz"), limit=40)
    requests = {request.rid: request for request in workload}
    followers = [request for request in requests.values() if request.after]
    assert len(requests) == 40 and len(followers) >= 30
    for request in followers:
        before = requests[request.after]
        history = np.concatenate([before.prompt, before.output])
        assert np.array_equal(request.prompt[: len(history)], history)


def test_agent_requests_share_prefixes(shared: Path) -> None:
    first, second = load_workload(str(shared / "traces" / "lmcache_miniswe.jsonl.xz"), limit=2)
    shorter = min(len(first.prompt), len(second.prompt))
    assert shorter > 500
    assert (first.prompt[:300] == second.prompt[:300]).all()


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"traj": 3}, "traj is 3; expected a list"),
        ({"traj": ["hello"]}, "traj[0] is no message with a role"),
        ({"session_id": "a", "input": 7, "output": ""}, "input is 7; expected text"),
        ({"session_id": "a", "input": "", "output": ""}, "input is empty"),
        ({"session_id": "a", "input": "x"}, "'output' is missing"),
    ],
)
def test_malformed_text_traces_are_named(tmp_path: Path, record: dict[str, object], reason: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(record))
    with pytest.raises(TraceError) as caught:
        load_workload(str(path))
    assert str(caught.value).startswith(f"{path}, line 1: ")
    assert reason in str(caught.value)
