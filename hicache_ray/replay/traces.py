"""Request traces in the Mooncake format: one JSON object a line, plain or gzipped.

    {"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2, ...]}

`hash_ids` names each block of 512 prompt tokens; the last block may be partial. Equal ids stand for equal prefixes up
to and with that block. The public files are in the Mooncake repository, folder FAST25-release/traces.

Traces that hold real text instead of block ids: tau-bench conversations and LMCache's agent traces.

Their text is cut into tokens by a fixed rule (words, spaces, signs), a number for each from its bytes: no tokenizer has
to be there, and a text's tokens begin with the tokens of each of its prefixes that ends at a word.
"""

from __future__ import annotations

import gzip
import json
import lzma
import re
import zlib
from collections.abc import Generator, Iterable, Iterator
from itertools import islice, zip_longest
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from hicache_ray.replay.requests import ReplayRequest, Tokens

BLOCK_TOKENS = 512
"""Prompt tokens one hash id stands for."""

MAX_REQUEST_TOKENS = 1 << 24
"""Longest prompt or answer taken, in tokens; a larger number in a trace is a mistake."""

_OPENERS = {".gz": gzip.open, ".xz": lzma.open}
_BROKEN = (gzip.BadGzipFile, lzma.LZMAError, EOFError, zlib.error, UnicodeDecodeError)


class TraceError(ValueError):
    """A trace that can't be replayed; the text names the file, the line and what is wrong with it."""


class TraceRequest(NamedTuple):
    """One line of a trace."""

    timestamp: float
    """Arrival, in milliseconds since the trace began."""
    input_length: int
    """Prompt tokens."""
    output_length: int
    """Answer tokens."""
    hash_ids: tuple[int, ...]
    """One id for each block of the prompt."""


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """The first `limit` requests of a trace file (all when None), each line checked.

    Raises:
        TraceError: the file is missing, unreadable or empty, or a line is malformed.
    """
    requests = [_parse(where, record) for where, record in islice(read_records(path), limit)]
    if not requests:
        raise TraceError(f"{path}: holds no requests")
    return requests


def read_records(path: Path) -> Generator[tuple[str, dict[str, Any]], None, None]:
    """The JSON objects of a file, one a line, each with "FILE, line N" for messages; blank lines are passed over.

    Raises:
        TraceError: the file can't be read, or a line is no JSON object.
    """
    number = 0
    try:
        with _open(path) as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    where = f"{path}, line {number}"
                    yield where, _json_object(where, line)
    except _BROKEN as error:
        raise TraceError(f"{path}, after line {number}: can't be read as text: {error}") from None
    except OSError as error:
        raise TraceError(f"{path}: can't be read: {error.strerror or error}") from None


def _open(path: Path) -> IO[str]:
    opener: Any = _OPENERS.get(path.suffix.lower(), open)
    return opener(path, "rt", encoding="utf-8")


def _json_object(where: str, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError also for a number of thousands of digits
        raise TraceError(f"{where}: no valid JSON: {error}") from None
    if not isinstance(record, dict):
        raise TraceError(f"{where}: expected a JSON object, got {_named(record)}")
    return record


def _parse(where: str, record: dict[str, Any]) -> TraceRequest:
    timestamp = require(where, record, "timestamp", (int, float))
    ids = require(where, record, "hash_ids", (list,))
    for position, block in enumerate(ids):
        if type(block) is not int or block < 0:
            raise TraceError(f"{where}: hash_ids[{position}] is {_named(block)}; expected a whole number from 0")
    length = _length(where, record, "input_length", least=1)
    blocks = -(-length // BLOCK_TOKENS)
    if len(ids) != blocks:
        raise TraceError(
            f"{where}: {len(ids)} hash_ids for an input_length of {length}; "
            f"blocks of {BLOCK_TOKENS} tokens make it {blocks}"
        )
    return TraceRequest(timestamp, length, _length(where, record, "output_length", least=0), tuple(ids))


def require(where: str, record: dict[str, Any], name: str, kinds: tuple[type, ...]) -> Any:
    """A field of a record, checked for its type; raises TraceError naming the line and the field."""
    if name not in record:
        raise TraceError(f"{where}: {name!r} is missing")
    value = record[name]
    if not isinstance(value, kinds) or isinstance(value, bool):
        wanted = {int: "a number", float: "a number", list: "a list", str: "text"}[kinds[-1]]
        raise TraceError(f"{where}: {name} is {_named(value)}; expected {wanted}")
    return value


def _length(where: str, record: dict[str, Any], name: str, least: int) -> int:
    value = require(where, record, name, (int,))
    if not least <= value <= MAX_REQUEST_TOKENS:
        raise TraceError(f"{where}: {name} is {value}; expected {least} to {MAX_REQUEST_TOKENS} tokens")
    return int(value)


def _named(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


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
