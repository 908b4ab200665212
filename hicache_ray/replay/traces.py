"""What a user names as a replay's workload: a made-up chat, or a trace file of a real service.

A trace is one JSON object a line, plain, .gz or .xz; a new format is one more `TraceFormat` in `FORMATS`.
The known ones are:

* Mooncake: `{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2, ...]}`. An id names each
  block of 512 prompt tokens; the last block may be partial. Equal ids stand for equal prefixes up to and with that
  block. The public files are in the Mooncake repository, folder FAST25-release/traces.
* tau-bench: `{"traj": [messages]}`. Each assistant message is a request whose prompt is all that came before it.
* LMCache's agent traces: `{"session_id": ..., "input": text, "output": text}`, a request a line.
"""

from __future__ import annotations

import gzip
import json
import lzma
import re
import zlib
from collections.abc import Callable, Generator, Iterator
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from hicache_ray.replay import chat
from hicache_ray.replay.requests import BlockRequest, BlockTrace, ReplayRequest, TokenArray, Workload

BLOCK_TOKENS = 512
"""Prompt tokens one hash id of a Mooncake trace stands for."""

_OPENERS = {".gz": gzip.open, ".xz": lzma.open}
_BROKEN = (gzip.BadGzipFile, lzma.LZMAError, EOFError, zlib.error, UnicodeDecodeError)

Records = Iterator[tuple[str, dict[str, Any]]]
"""JSON objects, each with "FILE, line N" for messages."""


class TraceError(ValueError):
    """A trace that can't be replayed; the text names the file, the line and what is wrong with it."""


class TraceOptions(NamedTuple):
    """What a user may say about a trace; see `load_workload`."""

    limit: int | None
    seed: int
    block_tokens: int


class TraceFormat(NamedTuple):
    """One form of trace file.

    Attributes:
        recognises: whether a file whose first record this is has this form.
        load: the workload of a file by its name and records. Raises TraceError for a malformed record.
    """

    recognises: Callable[[dict[str, Any]], bool]
    load: Callable[[str, Records, TraceOptions], Workload]


def load_workload(
    source: str, *, limit: int | None = None, seed: int = 0, block_tokens: int = BLOCK_TOKENS
) -> Workload:
    """The workload a user names: "chat:..." or the path of a trace in one of `FORMATS`.

    Args:
        source: the name.
        limit: the first so many requests only.
        seed: of everything that is made up: chat lengths and tokens, tokens of trace blocks and answers.
        block_tokens: tokens each 512-token block of a Mooncake trace becomes; fewer than 512 scale the trace down.

    Raises:
        TraceError: the file is missing, unreadable or empty, or a line is malformed.
        ChatSpecError: what is wrong with the chat.
    """
    if not source.strip():
        raise TraceError(f"{source!r} names no trace: give a file, or chat:sessions=50,turns=6")
    if source == chat.NAME or source.startswith(chat.PREFIX):
        return chat.chat_workload(source, limit, seed)
    records = read_records(Path(source))
    first = next(records, None)
    if first is None:
        raise TraceError(f"{source}: holds no requests")
    form = next(form for form in FORMATS if form.recognises(first[1]))
    return form.load(source, chain([first], records), TraceOptions(limit, seed, block_tokens))


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


def require(where: str, record: dict[str, Any], name: str, kinds: tuple[type, ...]) -> Any:
    """A field of a record, checked for its type; raises TraceError naming the line and the field."""
    if name not in record:
        raise TraceError(f"{where}: {name!r} is missing")
    value = record[name]
    if not isinstance(value, kinds) or isinstance(value, bool):
        wanted = {int: "a number", float: "a number", list: "a list", str: "text"}[kinds[-1]]
        raise TraceError(f"{where}: {name} is {_named(value)}; expected {wanted}")
    return value


def _named(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


MAX_REQUEST_TOKENS = 1 << 24
"""Longest prompt or answer taken, in tokens; a larger number in a trace is a mistake."""

_GOLDEN = 2654435761
"""Odd, so that multiplying by it permutes the 32-bit numbers."""


class MooncakeLine(NamedTuple):
    """One line of a Mooncake trace."""

    timestamp: float
    """Arrival, in milliseconds since the trace began."""
    input_length: int
    """Prompt tokens."""
    output_length: int
    """Answer tokens."""
    hash_ids: tuple[int, ...]
    """One id for each block of the prompt."""


def mooncake_lines(records: Records) -> list[MooncakeLine]:
    """The lines of a Mooncake trace, each checked; raises TraceError for a malformed one."""
    return [_mooncake_line(where, record) for where, record in records]


def _mooncake_line(where: str, record: dict[str, Any]) -> MooncakeLine:
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
    return MooncakeLine(timestamp, length, _length(where, record, "output_length", least=0), tuple(ids))


def _length(where: str, record: dict[str, Any], name: str, least: int) -> int:
    value = require(where, record, name, (int,))
    if not least <= value <= MAX_REQUEST_TOKENS:
        raise TraceError(f"{where}: {name} is {value}; expected {least} to {MAX_REQUEST_TOKENS} tokens")
    return int(value)


def _mooncake(source: str, records: Records, options: TraceOptions) -> Workload:
    limit, seed, block_tokens = options
    trace = mooncake_lines(islice(records, limit))
    numbers: dict[int, int] = {}
    for line in trace:
        for block in line.hash_ids:
            numbers.setdefault(block, len(numbers))
    if len(numbers) * block_tokens > 1 << 32:
        raise TraceError(
            f"{source}: {len(numbers)} distinct blocks of {block_tokens} tokens need more than 2^32 token ids; "
            "use a limit or smaller blocks"
        )

    requests = tuple(
        BlockRequest(
            np.array([numbers[block] for block in line.hash_ids], dtype=np.uint32),
            _scaled(line.input_length, block_tokens),
        )
        for line in trace
    )
    outputs = [_scaled(line.output_length, block_tokens) for line in trace]

    def make() -> Iterator[ReplayRequest]:
        for index, ((blocks, tokens), output) in enumerate(zip(requests, outputs, strict=True)):
            prompt = block_token_ids(blocks, block_tokens, seed)[:tokens]
            yield ReplayRequest(f"r{index}", prompt, _answer(index, output, seed))

    longest = max(request.tokens + output for request, output in zip(requests, outputs, strict=True))
    return Workload(source, len(trace), longest, make, BlockTrace(len(numbers), block_tokens, requests))


def block_token_ids(blocks: TokenArray, block_tokens: int, seed: int) -> TokenArray:
    """Token ids [blocks * block_tokens] of trace blocks: no two blocks share a token, whatever the seed."""
    places = np.add.outer(blocks * np.uint32(block_tokens), np.arange(block_tokens, dtype=np.uint32))
    return (places.reshape(-1) * np.uint32(_GOLDEN)) ^ np.uint32(seed * _GOLDEN & 0xFFFFFFFF)


def _scaled(tokens: int, block_tokens: int) -> int:
    return -(-tokens * block_tokens // BLOCK_TOKENS)


def _answer(index: int, tokens: int, seed: int) -> TokenArray:
    rng = np.random.default_rng((0xA45, seed, index))
    return rng.integers(1 << 32, size=tokens, dtype=np.uint32)


INTERLEAVED = 8
"""tau-bench conversations that run side by side."""

_PIECES = re.compile(r" ?\w{1,6}|\s+|[^\w\s]")


def text_tokens(text: str) -> TokenArray:
    """Token ids of a text, about one for four characters: words, spaces and signs, a number for each from its bytes.

    No tokenizer has to be there, and a text's tokens begin with those of each of its prefixes that ends at a word.
    """
    pieces = _PIECES.findall(text)
    return np.fromiter((zlib.crc32(piece.encode("utf-8", "surrogatepass")) for piece in pieces), np.uint32, len(pieces))


def _agent(source: str, records: Records, options: TraceOptions) -> Workload:
    requests = []
    for number, (where, record) in enumerate(islice(records, options.limit)):
        prompt = text_tokens(require(where, record, "input", (str,)))
        if not len(prompt):
            raise TraceError(f"{where}: input is empty; a prompt needs at least one token")
        output = text_tokens(require(where, record, "output", (str,)))
        requests.append(ReplayRequest(f"r{number}", prompt, output))
    return _listed(source, requests)


def _tau_bench(source: str, records: Records, options: TraceOptions) -> Workload:
    """The conversations run side by side, `INTERLEAVED` at a time."""
    conversations = [list(_conversation(number, *line)) for number, line in enumerate(records)]
    ordered = []
    for first in range(0, len(conversations), INTERLEAVED):
        rounds = zip_longest(*conversations[first : first + INTERLEAVED])
        ordered += [request for turn in rounds for request in turn if request is not None]
    return _listed(source, ordered[: options.limit])


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


def _listed(source: str, requests: list[ReplayRequest]) -> Workload:
    if not requests:
        raise TraceError(f"{source}: holds no requests")
    return Workload.of(source, len(requests), lambda: iter(requests))


FORMATS = (
    TraceFormat(lambda record: "traj" in record, _tau_bench),
    TraceFormat(lambda record: "session_id" in record and "input" in record, _agent),
    TraceFormat(lambda record: True, _mooncake),
)
"""Every format; the first that recognises a file's first record is taken."""
