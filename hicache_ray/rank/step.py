"""What crosses between a group and its ranks in one step: one request, one answer, both msgpack, both versioned.

The same request bytes go to every rank in the same order, so replicas do the same work (docs/design.md 4).
The types below are the format: rows are arrays of their fields in order, tokens are little-endian uint32 bytes. Nothing
here is pickled: bytes from outside are parsed, bounded and checked, and what does not fit raises ProtocolError naming
the field.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Struct, inspect

from hicache_ray.hashing import EMPTY_NAMESPACE, TOKEN_BYTES, Namespace

PROTOCOL_VERSION = 2
MAX_MESSAGE_BYTES = 256 << 20
MAX_RID = 1024
"""Most characters of a request id."""

NEXT_STEP = -1
"""As a step number: whichever step the group is at. With it several drivers may step one group."""

Rid = Annotated[str, Meta(min_length=1, max_length=MAX_RID)]
"""A request id."""
Count = Annotated[int, Meta(ge=0)]


class ProtocolError(ValueError):
    """A message that does not follow the protocol; the text names the field and what is wrong with it."""


class Row(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A part of a message: its fields in order, as one array. An array may end where only defaults would follow."""


class Admit(Row, frozen=True):
    """A request enters the group: its prompt is looked up and, where it pays, prefetched from L3."""

    rid: Rid
    tokens: bytes
    """The prompt, 4 bytes a token, little endian."""
    namespace: Namespace = EMPTY_NAMESPACE
    priority: int = 0
    max_new_tokens: Count = 0
    """L1 room to reserve for the answer, in tokens."""

    def __post_init__(self) -> None:
        _check_tokens("tokens", self.tokens)


class Finish(Row, frozen=True):
    """A request ends: its KV enters the tree unless `insert` is False."""

    rid: str
    output: bytes = b""
    """Tokens generated after the prompt whose KV is in the request's pages, 4 bytes each."""
    insert: bool = True

    def __post_init__(self) -> None:
        _check_tokens("output", self.output)


class Chunk(Row, frozen=True):
    """A running request has computed a part of its prompt (chunked prefill): others may share it from now on."""

    rid: str
    computed_tokens: Count
    """Leading tokens of the prompt whose KV is in the request's pages."""


class Peek(Row, frozen=True):
    """Asks what L1 and L2 hold of a prompt, without any effect, e.g. to order a queue by longest prefix."""

    tokens: bytes
    namespace: Namespace = EMPTY_NAMESPACE

    def __post_init__(self) -> None:
        _check_tokens("tokens", self.tokens)


class Control(Row, frozen=True):
    """A runtime command all ranks carry out in the same step: name and msgpack-able arguments."""

    name: str
    arguments: dict[str, Any] = {}


class StepRequest(Row, frozen=True, tag=PROTOCOL_VERSION):
    """Everything one scheduling iteration wants.

    Applied in the order aborts, finishes, chunks, controls, admits, polls, schedules, peeks.
    """

    generation: int
    step: int
    aborts: tuple[str, ...] = ()
    finishes: tuple[Finish, ...] = ()
    admits: tuple[Admit, ...] = ()
    polls: tuple[str, ...] = ()
    schedules: tuple[str, ...] = ()
    controls: tuple[Control, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    peeks: tuple[Peek, ...] = ()

    def encode(self) -> bytes:
        """The wire form; equal requests encode to equal bytes.

        Raises:
            ProtocolError: a field can't be sent, or no rank would take it: what a caller got wrong is said where it
                was said, and reaches no rank.
        """
        try:
            plain = msgspec.to_builtins(self, builtin_types=(bytes,), enc_hook=_plain)  # copies no tokens
            msgspec.convert(plain, StepRequest)
            return _encode(self)
        except msgspec.ValidationError as error:
            raise ProtocolError(f"step request: {_told(error, plain, StepRequest)}") from None
        except (TypeError, ValueError, OverflowError) as error:
            raise ProtocolError(f"step request: can't be sent ({error})") from None

    @classmethod
    def decode(cls, message: bytes) -> StepRequest:
        """Parses `encode`'s bytes; raises ProtocolError for anything else."""
        return _decoded(message, _REQUESTS, "step request")


class Admitted(Row, frozen=True):
    """Answer to Admit: what L1 and L2 hold of the prompt now, and whether L3 is being asked for the rest."""

    rid: str
    device_tokens: int
    host_tokens: int
    prefetch: str
    """"started", or why not: "no_storage", "short", "rate_limited", "not_backed"."""


class Polled(Row, frozen=True):
    """Answer to a poll: `ready` means the request may be scheduled now."""

    rid: str
    ready: bool
    storage_tokens: int
    """Tokens its prefetch brought from L3 into L2 so far."""


class Scheduled(Row, frozen=True):
    """Answer to a schedule: where the prompt's KV came from, in tokens; they add up to the prompt."""

    rid: str
    ok: bool
    reason: str
    """"" when ok, else "no_room" (try again after others finish)."""
    device_tokens: int = 0
    host_tokens: int = 0
    storage_tokens: int = 0
    computed_tokens: int = 0


class Finished(Row, frozen=True):
    """Answer to Finish: tokens whose KV the tree keeps of this request, and how many of them were there already."""

    rid: str
    kept_tokens: int
    duplicate_tokens: int


class Chunked(Row, frozen=True):
    """Answer to Chunk: leading tokens of the request that the tree holds now."""

    rid: str
    kept_tokens: int


class Peeked(Row, frozen=True):
    """Answer to Peek: tokens on the device, and beyond those on the host."""

    device_tokens: int
    host_tokens: int


class Agreed(Row, frozen=True):
    """What all ranks of a group answer alike to a step."""

    step: int
    digest: int
    """Of the tree after the step."""
    admitted: tuple[Admitted, ...] = ()
    polled: tuple[Polled, ...] = ()
    scheduled: tuple[Scheduled, ...] = ()
    finished: tuple[Finished, ...] = ()
    chunked: tuple[Chunked, ...] = ()
    peeked: tuple[Peeked, ...] = ()


class StepAnswer(Agreed, frozen=True, tag=PROTOCOL_VERSION):
    """One rank's answer: the agreed part, and what is its own."""

    rank: int = 0
    controlled: tuple[Any, ...] = ()
    timings_us: dict[str, float] = {}
    """Microseconds of `reduction`, `work` and `engine`."""
    engine: dict[str, Any] = {}

    def encode(self) -> bytes:
        """The wire form."""
        return _encode(self)

    @classmethod
    def decode(cls, message: bytes) -> StepAnswer:
        """Parses `encode`'s bytes; raises ProtocolError for anything else."""
        return _decoded(message, _ANSWERS, "step answer")


_Message = TypeVar("_Message", StepRequest, StepAnswer)


def _plain(value: Any) -> Any:
    """numpy's numbers, and texts or bytes of a type of their own, as Python's."""
    if isinstance(value, np.generic):
        return value.item()
    kinds: tuple[type[Any], ...] = (str, bytes, int, float, dict, list)
    for kind in kinds:
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"{value!r:.80} is a {type(value).__name__}: no msgpack type")


_encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
_REQUESTS = msgspec.msgpack.Decoder(StepRequest)
_ANSWERS = msgspec.msgpack.Decoder(StepAnswer)


def _check_tokens(name: str, tokens: bytes) -> None:
    if not isinstance(tokens, bytes):
        raise ProtocolError(f"{name}: expected bytes, got {tokens!r:.80}")
    if len(tokens) % TOKEN_BYTES:
        raise ProtocolError(f"{name}: {len(tokens)} bytes are no whole number of {TOKEN_BYTES}-byte tokens")


def _decoded(message: bytes, decoder: msgspec.msgpack.Decoder[_Message], what: str) -> _Message:
    if len(message) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"{what}: {len(message)} bytes, at most {MAX_MESSAGE_BYTES} are taken")
    try:
        decoded = decoder.decode(message)
    except (ValueError, RecursionError) as error:
        try:
            plain = msgspec.msgpack.decode(message)
        except (ValueError, TypeError, RecursionError) as broken:
            raise ProtocolError(f"{what}: not msgpack ({broken})") from None
        raise ProtocolError(f"{what}: {_told(error, plain, decoder.type)}") from None
    fields = len(decoded.__struct_fields__) + 1
    if message[0] != _ARRAY | fields:
        raise ProtocolError(f"{what}: expected {fields} fields, got {message[0] & ~_ARRAY}")
    return decoded


_ARRAY = 0x90
"""First byte of a msgpack array of less than 16 items, beside their number."""


def _told(error: Exception, value: Any, kind: Any) -> str:
    """msgspec's "Expected `bytes`, got `int` - at `$[5][0][1]`" with the field's name and the offending value."""
    text, _, path = str(error).replace("`", "").partition(" - at ")
    names: list[str] = []
    info = inspect.type_info(kind)
    for place in map(int, re.findall(r"\[(\d+)\]", path)):
        value = value[place]
        if isinstance(info, inspect.VarTupleType):
            info = info.item_type
        elif isinstance(info, inspect.StructType):
            field = place - (info.tag is not None)
            if field < 0:
                return f"version {value!r:.80}, this side speaks {info.tag}"
            names.append(info.fields[field].name)
            info = info.fields[field].type
    if text.startswith("Expected "):
        expected, _, got = text.removeprefix("Expected ").partition(", got ")
        text = f"expected {expected}, got {got if got.isdigit() else repr(value)[:80]}"
    return ": ".join([*filter(None, [".".join(names)]), text])
