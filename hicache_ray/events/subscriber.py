"""Receives published event batches in order, asks again for what was missed, and says where something is lost."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from typing import NamedTuple

import zmq

from hicache_ray.events.publisher import END_OF_REPLAY, SEQUENCE_BYTES
from hicache_ray.events.wire import EventBatch, EventFormatError, decode_batch

REPLAY_SECONDS = 5.0
"""How long a replay may take until the next of its batches."""

QUIET_SECONDS = 1.0
"""Silence after which a subscriber asks whether it missed something."""


class SequenceGap(RuntimeError):
    """Batches are lost for good: what was built from the log before is worth nothing now.

    Attributes:
        expected, received: sequence numbers of the batch that should have come and of the one that comes next.
    """

    def __init__(self, expected: int, received: int) -> None:
        super().__init__(f"event batches {expected} to {received - 1} are lost: clear what was built from the log")
        self.expected = expected
        self.received = received


class NumberedBatch(NamedTuple):
    """A batch and its sequence number."""

    sequence: int
    batch: EventBatch


class KVEventSubscriber:
    """The events of one publisher, of this package or of vLLM or SGLang. Not thread-safe.

    A batch that clears every tier first (the log begins anew) heals a gap before it: nothing older matters.

    Attributes:
        expected: sequence number of the batch to come; None until one has come.
        replayed: batches that came by replay.
    """

    def __init__(
        self, endpoint: str, replay_endpoint: str = "", *, topic: str = "", replay_timeout: float = REPLAY_SECONDS
    ) -> None:
        """Connects; with a replay endpoint the log is read from its kept beginning.

        Args:
            endpoint: of the publisher's stream.
            replay_endpoint: of its replays; "" when it has none.
            topic: messages of topics that begin with it are received.
            replay_timeout: seconds for the next batch of a replay.
        """
        self.expected: int | None = None
        self.replayed = 0
        self.replay_timeout = replay_timeout
        self._replay_endpoint = replay_endpoint
        self._ready: deque[NumberedBatch] = deque()
        self._replayed_to = -1
        self._ask_at = time.monotonic()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._stream: zmq.Socket[bytes] = self._context.socket(zmq.SUB)
        self._stream.set_hwm(0)
        self._stream.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._stream.connect(endpoint)

    def receive(self, timeout: float) -> NumberedBatch | None:
        """The next batch; None when none came within `timeout` seconds.

        Raises:
            SequenceGap: batches before the next one are lost; the next call returns it.
            EventFormatError: a message is no event batch; its number counts as received.
        """
        if not self._ready and not self._receive(timeout):
            return None
        first = self._ready[0]
        if self.expected is not None and first.sequence != self.expected and not first.batch.begins_anew:
            gap = SequenceGap(self.expected, first.sequence)
            self.expected = first.sequence
            raise gap
        self.expected = first.sequence + 1
        return self._ready.popleft()

    def close(self) -> None:
        """Gives the sockets back. May be called twice."""
        self._stream.close(0)

    def __enter__(self) -> KVEventSubscriber:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _receive(self, timeout: float) -> bool:
        """Waits for a message that was not received yet; asks for what was missed before it, or in a silence."""
        deadline = time.monotonic() + timeout
        while not self._ready:
            until = min(deadline, self._ask_at) if self._replay_endpoint else deadline
            if self._stream.poll(max(0, int((until - time.monotonic()) * 1000))):
                self._take(self._numbered(self._stream.recv_multipart()[1:]))
            elif self._replay_endpoint and time.monotonic() >= self._ask_at:
                # The last batches may have been sent before this stream had begun.
                self._ready.extend(self._replay(self.expected or 0))
            elif time.monotonic() >= deadline:
                return False
        return True

    def _take(self, received: NumberedBatch) -> None:
        """Makes a message of the stream ready, and before it what a replay has of a gap."""
        self._ask_at = time.monotonic() + QUIET_SECONDS
        if received.sequence <= self._replayed_to:
            return
        self._replayed_to = -1  # the stream is past what it has in common with the replay
        expected = self.expected or 0
        if received.sequence > expected and self._replay_endpoint:
            missed = self._replay(expected)
            self._ready.extend(numbered for numbered in missed if numbered.sequence < received.sequence)
        self._ready.append(received)

    def _replay(self, start: int) -> list[NumberedBatch]:
        """What the publisher still has from a number on; what came before it broke off, if it does."""
        asked: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        asked.set_hwm(0)
        asked.connect(self._replay_endpoint)
        answers: list[NumberedBatch] = []
        try:
            asked.send_multipart((b"", start.to_bytes(SEQUENCE_BYTES, "big")))
            while asked.poll(int(self.replay_timeout * 1000)):
                frames = asked.recv_multipart()[1:]
                if frames[0] == END_OF_REPLAY:
                    break
                with contextlib.suppress(EventFormatError):  # it is a gap then
                    answers.append(self._numbered(frames))
        finally:
            asked.close(0)
        self.replayed += len(answers)
        self._ask_at = time.monotonic() + QUIET_SECONDS
        if answers:
            self._replayed_to = answers[-1].sequence
        return answers

    def _numbered(self, frames: list[bytes]) -> NumberedBatch:
        if len(frames) != 2 or len(frames[0]) != SEQUENCE_BYTES:
            raise EventFormatError(f"a message of {len(frames)} frames; expected a sequence number and a payload")
        sequence = int.from_bytes(frames[0], "big")
        try:
            return NumberedBatch(sequence, decode_batch(frames[1]))
        except EventFormatError as error:
            if self.expected == sequence:
                self.expected += 1
            raise EventFormatError(f"event batch {sequence}: {error}") from None
