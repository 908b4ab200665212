"""What a user names as a replay's workload: a made-up chat, or a trace file."""

from __future__ import annotations

from hicache_ray.replay import chat
from hicache_ray.replay.requests import Workload
from hicache_ray.replay.traces import BLOCK_TOKENS, TraceError, TraceOptions, load_trace


def load_workload(
    source: str, *, limit: int | None = None, seed: int = 0, block_tokens: int = BLOCK_TOKENS
) -> Workload:
    """The workload a user names: "chat:..." or the path of a trace in one of `traces.FORMATS`.

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
        return chat.chat_workload(source, limit, seed)
    return load_trace(source, TraceOptions(limit, seed, block_tokens))
