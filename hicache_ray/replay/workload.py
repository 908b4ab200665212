"""Where a replay's requests come from: a trace file or the chat generator, behind one face."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path

import numpy as np

from hicache_ray.replay import chat
from hicache_ray.replay import traces as text_traces
from hicache_ray.replay.requests import BlockRequest, ReplayRequest, Tokens
from hicache_ray.replay.traces import BLOCK_TOKENS, TraceError, TraceRequest, read_records, read_trace

_GOLDEN = 2654435761
"""Odd, so that multiplying by it permutes the 32-bit numbers."""


@dataclass(frozen=True, eq=False)
class BlockTrace:
    """A trace as block ids.

    Attributes:
        unique: distinct blocks.
        block_tokens: tokens a full block stands for.
        requests: in order of arrival.
    """

    unique: int
    block_tokens: int
    requests: tuple[BlockRequest, ...]


@dataclass(frozen=True, eq=False)
class Workload:
    """Requests in order of arrival; iterating twice gives the same requests twice.

    Attributes:
        name: what the user named.
        total: number of requests.
        longest: tokens of the longest request with its answer.
        make: begins the requests from the first one.
        blocks: the trace a replay of the index alone walks; None where the workload has no blocks.
    """

    name: str
    total: int
    longest: int
    make: Callable[[], Iterator[ReplayRequest]] = field(repr=False)
    blocks: BlockTrace | None = field(default=None, repr=False)

    def __iter__(self) -> Iterator[ReplayRequest]:
        return self.make()


def load_workload(
    source: str, *, limit: int | None = None, seed: int = 0, block_tokens: int = BLOCK_TOKENS
) -> Workload:
    """The workload a user names: "chat:..." or the path of a trace (Mooncake, tau-bench, LMCache agent).

    Args:
        source: the name.
        limit: the first so many requests only.
        seed: of everything that is made up: chat lengths and tokens, tokens of trace blocks and answers.
        block_tokens: tokens each 512-token block of a Mooncake trace becomes; fewer than 512 scale the trace down.

    Raises:
        TraceError, ChatSpecError: what is wrong with the source.
    """
    if not source.strip():
        raise TraceError(f"{source!r} names no trace: give a file, or chat:sessions=50,turns=6")
    if source == chat.NAME or source.startswith(chat.PREFIX):
        spec = chat.ChatSpec.parse(source)
        total = spec.requests if limit is None else min(limit, spec.requests)
        return _made(source, total, lambda: islice(chat.chat_requests(spec, seed), total))
    return _trace_workload(source, limit, seed, block_tokens)


def _trace_workload(source: str, limit: int | None, seed: int, block_tokens: int) -> Workload:
    path = Path(source)
    records = read_records(path)
    first = next(records, None)
    if first is None:
        raise TraceError(f"{path}: holds no requests")
    if text_traces.is_tau_bench(first[1]):
        return _fixed(source, text_traces.tau_requests(chain([first], records))[:limit])
    if text_traces.is_agent_trace(first[1]):
        return _fixed(source, text_traces.agent_requests(islice(chain([first], records), limit)))
    records.close()
    return _block_workload(source, read_trace(path, limit), seed, block_tokens)


def _fixed(source: str, requests: list[ReplayRequest]) -> Workload:
    if not requests:
        raise TraceError(f"{source}: holds no requests")
    return _made(source, len(requests), lambda: iter(requests))


def _made(source: str, total: int, make: Callable[[], Iterator[ReplayRequest]]) -> Workload:
    longest = max(len(request.prompt) + len(request.output) for request in make())
    return Workload(source, total, longest, make)


def _block_workload(source: str, trace: list[TraceRequest], seed: int, block_tokens: int) -> Workload:
    numbers: dict[int, int] = {}
    for request in trace:
        for block in request.hash_ids:
            numbers.setdefault(block, len(numbers))
    if len(numbers) * block_tokens > 1 << 32:
        raise TraceError(
            f"{source}: {len(numbers)} distinct blocks of {block_tokens} tokens need more than 2^32 token ids; "
            "use a limit or smaller blocks"
        )

    requests = tuple(
        BlockRequest(
            np.array([numbers[block] for block in request.hash_ids], dtype=np.uint32),
            _scaled(request.input_length, block_tokens),
        )
        for request in trace
    )

    def make() -> Iterator[ReplayRequest]:
        for index, (request, (blocks, tokens)) in enumerate(zip(trace, requests, strict=True)):
            yield ReplayRequest(
                rid=f"r{index}",
                prompt=block_token_ids(blocks, block_tokens, seed)[:tokens],
                output=_answer(index, _scaled(request.output_length, block_tokens), seed),
            )

    longest = max(
        tokens + _scaled(request.output_length, block_tokens)
        for request, (_, tokens) in zip(trace, requests, strict=True)
    )
    return Workload(source, len(trace), longest, make, BlockTrace(len(numbers), block_tokens, requests))


def block_token_ids(blocks: Tokens, block_tokens: int, seed: int) -> Tokens:
    """Token ids [blocks * block_tokens] of trace blocks: no two blocks share a token, whatever the seed."""
    places = np.add.outer(blocks * np.uint32(block_tokens), np.arange(block_tokens, dtype=np.uint32))
    return (places.reshape(-1) * np.uint32(_GOLDEN)) ^ np.uint32(seed * _GOLDEN & 0xFFFFFFFF)


def _scaled(tokens: int, block_tokens: int) -> int:
    return -(-tokens * block_tokens // BLOCK_TOKENS)


def _answer(index: int, tokens: int, seed: int) -> Tokens:
    rng = np.random.default_rng((0xA45, seed, index))
    return rng.integers(1 << 32, size=tokens, dtype=np.uint32)
