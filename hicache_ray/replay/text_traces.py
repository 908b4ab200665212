"""Traces that hold real text instead of block ids: tau-bench conversations and LMCache's agent traces.

Their text is cut into tokens by a fixed rule (words, spaces, signs), a number for each from its bytes: no tokenizer has
to be there, and a text's tokens begin with the tokens of each of its prefixes that ends at a word.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import Any

import numpy as np

from hicache_ray.replay.requests import ReplayRequest, Tokens
from hicache_ray.replay.traces import TraceError, require

INTERLEAVED = 8
"""tau-bench conversations that run side by side."""

_PIECES = re.compile(r" ?\w{1,6}|\s+|[^\w\s]")

Records = Iterable[tuple[str, dict[str, Any]]]


def text_tokens(text: str) -> Tokens:
    """Token ids of a text, about one for four characters."""
    pieces = _PIECES.findall(text)
    return np.fromiter((zlib.crc32(piece.encode("utf-8", "surrogatepass")) for piece in pieces), np.uint32, len(pieces))


def is_tau_bench(record: dict[str, Any]) -> bool:
    """Whether a record has the fields of tau-bench's results."""
    return "traj" in record


def is_agent_trace(record: dict[str, Any]) -> bool:
    """Whether a record has the fields of LMCache's agent traces."""
    return "session_id" in record and "input" in record


def agent_requests(records: Records) -> list[ReplayRequest]:
    """LMCache agent traces: a request a line, in file order; raises TraceError for a malformed one."""
    requests = []
    for number, (where, record) in enumerate(records):
        prompt = text_tokens(require(where, record, "input", (str,)))
        if not len(prompt):
            raise TraceError(f"{where}: input is empty; a prompt needs at least one token")
        output = text_tokens(require(where, record, "output", (str,)))
        requests.append(ReplayRequest(f"r{number}", prompt, output))
    return requests


def tau_requests(records: Records) -> list[ReplayRequest]:
    """tau-bench: each assistant message is a request whose prompt is all that came before it.

    The conversations run side by side, `INTERLEAVED` at a time; raises TraceError for a malformed line.
    """
    conversations = [list(_conversation(number, *line)) for number, line in enumerate(records)]
    ordered = []
    for first in range(0, len(conversations), INTERLEAVED):
        rounds = zip_longest(*conversations[first : first + INTERLEAVED])
        ordered += [request for turn in rounds for request in turn if request is not None]
    return ordered


def _conversation(number: int, where: str, record: dict[str, Any]) -> Iterator[ReplayRequest]:
    history = np.empty(0, dtype=np.uint32)
    after = None
    for turn, message in enumerate(require(where, record, "traj", (list,))):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise TraceError(f"{where}: traj[{turn}] is no message with a role")
        tokens = text_tokens(f"{message['role']}: {message.get('content') or ''}{_calls(message)}\n")
        if message["role"] == "assistant" and len(history):
            rid = f"c{number}m{turn}"
            yield ReplayRequest(rid, history, tokens, after=after)
            after = rid
        history = np.concatenate([history, tokens])


def _calls(message: dict[str, Any]) -> str:
    calls = message.get("tool_calls")
    return json.dumps(calls, sort_keys=True) if calls else ""
