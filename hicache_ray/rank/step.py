"""What crosses between a group and its ranks in one step: one request, one answer, both msgpack, both versioned.

The same request bytes go to every rank in the same order, so replicas that decode them do the same work (DESIGN 4).
Tokens travel as little-endian uint32 bytes. Nothing here is pickled: bytes from outside are parsed, bounded and
checked, and what does not fit raises ProtocolError naming the field.

The one int64 vector a step reduces with MIN: local progress in, what all ranks have reached out (DESIGN 4).

Layout: a header that proves the ranks are at the same point (each value x beside -x: MIN of both shows any
difference), cumulative counters of finished transfers, and five numbers for each prefetch in flight. Counts are
cumulative, not "new since last time", so a rank that applied an extra step can be seen and nothing is counted twice. A
value that needs MAX travels as its negative (case 51).

A group's answer to a step, from its ranks' answers: the agreed part once, the ranks' own parts side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgpack
import numpy as np

from hicache_ray.hashing import EMPTY_NAMESPACE, Namespace

PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 256 << 20
MAX_RID = 1024
"""Most characters of a request id."""
TOKEN_BYTES = 4

NEXT_STEP = -1
"""As a step number: whichever step the group is at. With it several drivers may step one group."""


class ProtocolError(ValueError):
    """A message that does not follow the protocol; the text names the field and what is wrong with it."""


class Admit(NamedTuple):
    """A request enters the group: its prompt is looked up and, where it pays, prefetched from L3."""

    rid: str
    tokens: bytes
    """The prompt, 4 bytes a token, little endian."""
    namespace: Namespace = EMPTY_NAMESPACE
    priority: int = 0
    max_new_tokens: int = 0
    """L1 room to reserve for the answer, in tokens."""


class Finish(NamedTuple):
    """A request ends: its KV enters the tree unless `insert` is False."""

    rid: str
    output: bytes = b""
    """Tokens generated after the prompt whose KV is in the request's pages, 4 bytes each."""
    insert: bool = True


class Chunk(NamedTuple):
    """A running request has computed a part of its prompt (chunked prefill): others may share it from now on."""

    rid: str
    computed_tokens: int
    """Leading tokens of the prompt whose KV is in the request's pages."""


class Peek(NamedTuple):
    """Asks what L1 and L2 hold of a prompt, without any effect, e.g. to order a queue by longest prefix."""

    tokens: bytes
    namespace: Namespace = EMPTY_NAMESPACE


class Control(NamedTuple):
    """A runtime command all ranks carry out in the same step: name and msgpack-able arguments."""

    name: str
    arguments: dict[str, Any] = {}


@dataclass(frozen=True)
class StepRequest:
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
        """The wire form; equal requests encode to equal bytes."""
        return msgpack.packb(
            [
                PROTOCOL_VERSION,
                self.generation,
                self.step,
                self.aborts,
                self.finishes,
                [[a.rid, a.tokens, list(a.namespace), a.priority, a.max_new_tokens] for a in self.admits],
                self.polls,
                self.schedules,
                self.controls,
                self.chunks,
                [[p.tokens, list(p.namespace)] for p in self.peeks],
            ]
        )

    def checked(self) -> bytes:
        """The wire form, after a look at every field; raises ProtocolError for what no rank would take.

        What a caller got wrong is said where it was said, and reaches no rank.
        """
        try:
            message = self.encode()
        except (TypeError, ValueError, OverflowError, AttributeError) as error:
            raise ProtocolError(f"step request: can't be sent ({error})") from None
        self.decode(message)
        return message

    @classmethod
    def decode(cls, message: bytes) -> StepRequest:
        """Parses `encode`'s bytes; raises ProtocolError for anything else."""
        fields = _unpack(message, 11, "step request")
        _, generation, step, aborts, finishes, admits, polls, schedules, controls, chunks, peeks = fields
        return cls(
            generation=_typed(generation, int, "generation"),
            step=_typed(step, int, "step"),
            aborts=_texts(aborts, "aborts"),
            finishes=tuple(_finish(row) for row in _rows(finishes, 3, "finishes")),
            admits=tuple(_admit(row) for row in _rows(admits, 5, "admits")),
            polls=_texts(polls, "polls"),
            schedules=_texts(schedules, "schedules"),
            controls=tuple(_control(row) for row in _rows(controls, 2, "controls")),
            chunks=tuple(_chunk(row) for row in _rows(chunks, 2, "chunks")),
            peeks=tuple(
                Peek(_tokens(tokens, "peek tokens"), _namespace(namespace))
                for tokens, namespace in _rows(peeks, 2, "peeks")
            ),
        )


class Admitted(NamedTuple):
    """Answer to Admit: what L1 and L2 hold of the prompt now, and whether L3 is being asked for the rest."""

    rid: str
    device_tokens: int
    host_tokens: int
    prefetch: str
    """"started", or why not: "no_storage", "short", "rate_limited", "not_backed"."""


class Polled(NamedTuple):
    """Answer to a poll: `ready` means the request may be scheduled now."""

    rid: str
    ready: bool
    storage_tokens: int
    """Tokens its prefetch brought from L3 into L2 so far."""


class Scheduled(NamedTuple):
    """Answer to a schedule: where the prompt's KV came from, in tokens; they add up to the prompt."""

    rid: str
    ok: bool
    reason: str
    """"" when ok, else "no_room" (try again after others finish)."""
    device_tokens: int = 0
    host_tokens: int = 0
    storage_tokens: int = 0
    computed_tokens: int = 0


class Finished(NamedTuple):
    """Answer to Finish: tokens whose KV the tree keeps of this request, and how many of them were there already."""

    rid: str
    kept_tokens: int
    duplicate_tokens: int


class Chunked(NamedTuple):
    """Answer to Chunk: leading tokens of the request that the tree holds now."""

    rid: str
    kept_tokens: int


class Peeked(NamedTuple):
    """Answer to Peek: tokens on the device, and beyond those on the host."""

    device_tokens: int
    host_tokens: int


@dataclass(frozen=True)
class StepAnswer:
    """One rank's answer. All ranks of a group answer alike but for `timings_us` and `engine`."""

    rank: int
    step: int
    digest: int
    admitted: tuple[Admitted, ...] = ()
    polled: tuple[Polled, ...] = ()
    scheduled: tuple[Scheduled, ...] = ()
    finished: tuple[Finished, ...] = ()
    chunked: tuple[Chunked, ...] = ()
    peeked: tuple[Peeked, ...] = ()
    controlled: tuple[Any, ...] = ()
    timings_us: dict[str, float] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        """The wire form."""
        return msgpack.packb(
            [
                PROTOCOL_VERSION,
                self.rank,
                self.step,
                self.digest,
                self.admitted,
                self.polled,
                self.scheduled,
                self.finished,
                self.chunked,
                self.peeked,
                self.controlled,
                self.timings_us,
                self.engine,
            ]
        )

    @classmethod
    def decode(cls, message: bytes) -> StepAnswer:
        """Parses `encode`'s bytes; raises ProtocolError for anything else."""
        fields = _unpack(message, 13, "step answer")
        _, rank, step, digest, admitted, polled, scheduled, finished, chunked, peeked = fields[:10]
        controlled, timings, engine = fields[10:]
        return cls(
            rank=_typed(rank, int, "rank"),
            step=_typed(step, int, "step"),
            digest=_typed(digest, int, "digest"),
            admitted=tuple(Admitted(*row) for row in _rows(admitted, 4, "admitted")),
            polled=tuple(Polled(*row) for row in _rows(polled, 3, "polled")),
            scheduled=tuple(Scheduled(*row) for row in _rows(scheduled, 7, "scheduled")),
            finished=tuple(Finished(*row) for row in _rows(finished, 3, "finished")),
            chunked=tuple(Chunked(*row) for row in _rows(chunked, 2, "chunked")),
            peeked=tuple(Peeked(*row) for row in _rows(peeked, 2, "peeked")),
            controlled=tuple(_typed(controlled, list, "controlled")),
            timings_us=_typed(timings, dict, "timings_us"),
            engine=_typed(engine, dict, "engine"),
        )

    def agreed(self) -> tuple[Any, ...]:
        """The part that must be equal on all ranks of a group."""
        return tuple(getattr(self, name) for name in AGREED_FIELDS)


AGREED_FIELDS = ("step", "digest", "admitted", "polled", "scheduled", "finished", "chunked", "peeked")
"""Names of the fields of an answer that all ranks of a group must agree on."""


def _unpack(message: bytes, count: int, what: str) -> list[Any]:
    if len(message) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"{what}: {len(message)} bytes, at most {MAX_MESSAGE_BYTES} are taken")
    try:
        fields = msgpack.unpackb(message, raw=False, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"{what}: not msgpack ({error})") from None
    if not isinstance(fields, list) or not fields:
        raise ProtocolError(f"{what}: expected a list of {count} fields, got {type(fields).__name__}")
    if fields[0] != PROTOCOL_VERSION:
        raise ProtocolError(f"{what}: version {fields[0]!r}, this side speaks {PROTOCOL_VERSION}")
    if len(fields) != count:
        raise ProtocolError(f"{what}: expected {count} fields, got {len(fields)}")
    return fields


def _typed(value: Any, kind: type, name: str) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ProtocolError(f"{name}: expected {kind.__name__}, got {value!r:.80}")
    return value


def _texts(values: Any, name: str) -> tuple[str, ...]:
    return tuple(_typed(value, str, name) for value in _typed(values, list, name))


def _rows(values: Any, width: int, name: str) -> list[list[Any]]:
    rows = _typed(values, list, name)
    for row in rows:
        if not isinstance(row, list) or len(row) != width:
            raise ProtocolError(f"{name}: expected rows of {width} fields, got {row!r:.80}")
    return rows


def _tokens(value: Any, name: str) -> bytes:
    tokens = _typed(value, bytes, name)
    if len(tokens) % TOKEN_BYTES:
        raise ProtocolError(f"{name}: {len(tokens)} bytes are no whole number of {TOKEN_BYTES}-byte tokens")
    return tokens


def _admit(row: list[Any]) -> Admit:
    rid, tokens, namespace, priority, max_new_tokens = row
    if _typed(max_new_tokens, int, "max_new_tokens") < 0:
        raise ProtocolError(f"max_new_tokens: {max_new_tokens} is negative")
    if not 0 < len(_typed(rid, str, "rid")) <= MAX_RID:
        raise ProtocolError(f"rid: {len(rid)} characters, give 1 to {MAX_RID}")
    return Admit(
        rid,
        _tokens(tokens, "tokens"),
        _namespace(namespace),
        _typed(priority, int, "priority"),
        max_new_tokens,
    )


def _namespace(value: Any) -> Namespace:
    if not isinstance(value, list) or len(value) != len(Namespace._fields):
        raise ProtocolError(f"namespace: expected {len(Namespace._fields)} fields, got {value!r:.80}")
    if not all(part is None or isinstance(part, str) for part in value):
        raise ProtocolError(f"namespace: expected texts or nil, got {value!r:.80}")
    return Namespace(*value)


def _chunk(row: list[Any]) -> Chunk:
    rid, computed = row
    if _typed(computed, int, "computed_tokens") < 0:
        raise ProtocolError(f"computed_tokens: {computed} is negative")
    return Chunk(_typed(rid, str, "rid"), computed)


def _finish(row: list[Any]) -> Finish:
    rid, output, insert = row
    return Finish(_typed(rid, str, "rid"), _tokens(output, "output"), _typed(insert, bool, "insert"))


def _control(row: list[Any]) -> Control:
    name, arguments = row
    return Control(_typed(name, str, "control"), _typed(arguments, dict, "control arguments"))


HEADER = 8
COUNTERS = 4
PER_PREFETCH = 5


class DesyncError(RuntimeError):
    """Ranks of a group are not at the same generation, step or tree: seen in the reduction itself."""


class PrefetchProgress(NamedTuple):
    """How far one prefetch is; after the reduction, how far it is on every rank."""

    queried: bool
    """The store has said how many pages it has."""
    hit_pages: int
    completed_pages: int
    can_terminate: bool
    """False if any rank still wants to wait (MAX of "not done")."""
    terminated: bool
    """True if any rank has ended it (MAX)."""


class Progress(NamedTuple):
    """A rank's local progress, or the agreed one. Counters are cumulative since the generation began."""

    generation: int
    step: int
    digest: int
    """64-bit tree digest before this step."""
    writes: int
    loads: int
    backups: int
    releases: int
    prefetches: tuple[PrefetchProgress, ...]

    def vector(self) -> np.ndarray:
        """int64 vector of `HEADER + COUNTERS + PER_PREFETCH * prefetches` numbers, to be reduced with MIN."""
        high, low = self.digest >> 32, self.digest & 0xFFFFFFFF
        numbers = [
            *(self.generation, -self.generation, self.step, -self.step, high, -high, low, -low),
            *(self.writes, self.loads, self.backups, self.releases),
        ]
        for p in self.prefetches:
            numbers += (p.queried, p.hit_pages, p.completed_pages, -(not p.can_terminate), -p.terminated)
        return np.array(numbers, dtype=np.int64)

    @classmethod
    def agreed(cls, reduced: np.ndarray) -> Progress:
        """Reads a reduced vector; raises DesyncError when the ranks were not at the same point."""
        numbers: Sequence[int] = reduced.tolist()
        for name, at in (("generation", 0), ("step", 2), ("tree digest", 4), ("tree digest", 6)):
            if numbers[at] != -numbers[at + 1]:
                raise DesyncError(
                    f"ranks differ in their {name} at step {numbers[2]}: {numbers[at]} to {-numbers[at + 1]}"
                )
        tail = numbers[HEADER + COUNTERS :]
        rows = [tail[i : i + PER_PREFETCH] for i in range(0, len(tail), PER_PREFETCH)]
        writes, loads, backups, releases = numbers[HEADER : HEADER + COUNTERS]
        return cls(
            generation=numbers[0],
            step=numbers[2],
            digest=numbers[4] << 32 | numbers[6],
            writes=writes,
            loads=loads,
            backups=backups,
            releases=releases,
            prefetches=tuple(
                PrefetchProgress(bool(queried), hit, done, waiting == 0, ended != 0)
                for queried, hit, done, waiting, ended in rows
            ),
        )


@dataclass(frozen=True)
class GroupAnswer:
    """What a group answered to one step; `controlled` and `engine` by rank.

    `timings_us`: `total` (as the caller saw it); `reduction`, `work`, `engine` of the slowest rank; `message` is the
    rest: encoding, travel, decoding.
    """

    step: int
    digest: int
    admitted: tuple[Admitted, ...]
    polled: tuple[Polled, ...]
    scheduled: tuple[Scheduled, ...]
    finished: tuple[Finished, ...]
    chunked: tuple[Chunked, ...]
    peeked: tuple[Peeked, ...]
    controlled: tuple[tuple[Any, ...], ...]
    engine: tuple[dict[str, Any], ...]
    timings_us: dict[str, float]


def differences(one: StepAnswer, other: StepAnswer) -> list[str]:
    """Names of the fields in which two ranks differ though they must agree."""
    pairs = zip(AGREED_FIELDS, one.agreed(), other.agreed(), strict=True)
    return [name for name, a, b in pairs if a != b]


def merge(answers: Sequence[StepAnswer], timings_us: dict[str, float]) -> GroupAnswer:
    """The group's answer; the ranks' answers must agree."""
    first = answers[0]
    return GroupAnswer(
        **{name: getattr(first, name) for name in AGREED_FIELDS},
        controlled=tuple(answer.controlled for answer in answers),
        engine=tuple(answer.engine for answer in answers),
        timings_us=timings_us,
    )
