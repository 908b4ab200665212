"""Publishes event batches over ZMQ: a PUB socket for the stream, a ROUTER socket for what a subscriber missed.

The messages are vLLM's: (topic, sequence number as 8 bytes big endian, payload). A replay request is a sequence number;
the answer is (sequence number, payload) of every batch from there on that is still kept, then (END, empty).
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import zmq

from hicache_ray.events.recorder import RecordedBatch
from hicache_ray.events.wire import encode_batch

logger = logging.getLogger("hicache_ray.events")

SEQUENCE_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
CLOCK_BITS = 20
"""Sequence numbers begin at the clock's milliseconds shifted by this: a publisher that starts again never repeats one,
so that its start is a gap to every subscriber."""


class EventPublisherError(ValueError):
    """An endpoint that can't be used; the text says why and what would work."""


@dataclass(frozen=True)
class PublisherOptions:
    """How events are published.

    Attributes:
        endpoint: of the stream. One with `*`, `::`, `ipc://` or `inproc://` is bound, any other connected to, as vLLM
            does. Port `*` is any free one.
        replay_endpoint: bound; "" for none.
        topic: first frame of every message.
        encoding: one of `hicache_ray.config.names.KV_EVENT_ENCODINGS`.
        kept_batches: batches that can be replayed.
        queued_batches: batches that may wait for the publisher's thread; beyond them one is lost, and its number with
            it, so that subscribers see the gap.
    """

    endpoint: str = "tcp://*:5557"
    replay_endpoint: str = ""
    topic: str = ""
    encoding: str = "array"
    kept_batches: int = 10_000
    queued_batches: int = 100_000


class KVEventPublisher:
    """Numbers batches and sends them from a thread of its own; `publish` never waits for anybody.

    Attributes:
        endpoint, replay_endpoint: what is bound or connected to, wildcard ports filled in.
        next_sequence: of the next batch.
        published: batches that were sent.
        lost: batches that were not: the queue was full, or a batch could not be encoded.
    """

    def __init__(self, options: PublisherOptions | None = None, *, first_sequence: int | None = None) -> None:
        """Opens the sockets; `first_sequence` None: from the clock.

        Raises:
            EventPublisherError: an endpoint can't be used.
        """
        self.options = options or PublisherOptions()
        self.next_sequence = time.time_ns() // 1_000_000 << CLOCK_BITS if first_sequence is None else first_sequence
        self.published = self.lost = 0
        self._topic = self.options.topic.encode()
        self._queue: deque[tuple[int, RecordedBatch]] = deque()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=self.options.kept_batches)
        self._closed = False
        self._stream = _open(zmq.PUB, self.options.endpoint, self.options.queued_batches)
        self.endpoint = _address(self._stream)
        self._replay: zmq.Socket[bytes] | None = None
        self.replay_endpoint = ""
        if self.options.replay_endpoint:
            try:
                self._replay = _open(zmq.ROUTER, self.options.replay_endpoint, 0)
            except EventPublisherError:
                self._stream.close(0)
                raise
            self.replay_endpoint = _address(self._replay)
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="hicache-kv-events", daemon=True)
        self._thread.start()

    def publish(self, recorded: RecordedBatch) -> int:
        """Queues a batch; returns its sequence number. RuntimeError after `close`."""
        if self._closed:
            raise RuntimeError("the event publisher is closed")
        sequence = self.next_sequence
        self.next_sequence += 1
        if len(self._queue) >= self.options.queued_batches:
            self._count_lost("%d event batches are queued already: one is lost", len(self._queue))
            return sequence
        self._queue.append((sequence, recorded))
        self._wake_thread()
        return sequence

    def close(self, timeout: float = 5.0) -> None:
        """Sends what is queued and closes the sockets. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._wake_thread()
        self._thread.join(timeout)
        if self._thread.is_alive():
            logger.warning(
                "the event publisher did not end within %g s: %d batches are lost", timeout, len(self._queue)
            )
            return
        for opened in (self._stream, self._replay):
            if opened is not None:
                opened.close(linger=int(timeout * 1000))
        self._wake.close()
        self._woken.close()

    def _wake_thread(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it has not come to the earlier calls yet
            self._wake.send(b"\0")

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while not self._closed or self._queue:
            ready = dict(poller.poll())
            if self._woken.fileno() in ready:
                self._woken.recv(4096)
            while self._queue:
                self._send(*self._queue.popleft())
            if self._replay in ready:
                try:
                    self._answer_replay()
                except zmq.ZMQError:
                    logger.exception("a replay of KV events broke off")

    def _send(self, sequence: int, recorded: RecordedBatch) -> None:
        try:
            payload = encode_batch(recorded.batch(), self.options.encoding)
            self._stream.send_multipart((self._topic, sequence.to_bytes(SEQUENCE_BYTES, "big"), payload))
        except Exception:  # whatever one batch has, the thread goes on with the next
            self._count_lost("event batch %d could not be sent", sequence, exc_info=True)
            return
        self._kept.append((sequence, payload))
        self.published += 1

    def _answer_replay(self) -> None:
        assert self._replay is not None
        frames = self._replay.recv_multipart()
        if len(frames) != 3 or frames[1] or len(frames[2]) != SEQUENCE_BYTES:
            logger.warning("a replay request of %d frames was ignored: expected one of 8 bytes", len(frames))
            return
        peer, start = frames[0], int.from_bytes(frames[2], "big")
        for sequence, payload in self._kept:
            if sequence >= start:
                self._replay.send_multipart((peer, b"", sequence.to_bytes(SEQUENCE_BYTES, "big"), payload))
        self._replay.send_multipart((peer, b"", END_OF_REPLAY, b""))

    def _count_lost(self, text: str, *arguments: Any, exc_info: bool = False) -> None:
        self.lost += 1
        if self.lost == 1:
            logger.warning(f"{text}; further ones are only counted", *arguments, exc_info=exc_info)


def _open(kind: int, endpoint: str, high_water_mark: int) -> zmq.Socket[bytes]:
    opened: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    opened.set_hwm(high_water_mark)
    binds = kind == zmq.ROUTER or "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
    try:
        (opened.bind if binds else opened.connect)(endpoint)
    except zmq.ZMQError as error:
        opened.close(0)
        advice = "; give every group its own, or port * for any free one" if error.errno == zmq.EADDRINUSE else ""
        raise EventPublisherError(
            f"KV events can't be published at {endpoint!r}: {zmq.strerror(error.errno or 0)}{advice}"
        ) from error
    return opened


def _address(opened: zmq.Socket[bytes]) -> str:
    return str(opened.get_string(zmq.LAST_ENDPOINT)).rstrip("\0")
