"""Published KV events: order, gaps, replays, restarts; and what a subscriber written for vLLM sees."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgpack
import pytest
import zmq

from hicache_ray.events import GPU, BlockStored, EventBatch, EventFormatError, EventIndex, EventRecorder
from hicache_ray.events.publisher import (
    END_OF_REPLAY,
    EventPublisherError,
    KVEventPublisher,
    PublisherOptions,
)
from hicache_ray.events.recorder import RecordedBatch
from hicache_ray.events.subscriber import KVEventSubscriber, NumberedBatch, SequenceGap
from hicache_ray.testing.serving import wait_for
from tests.index_kit import Kit
from tests.test_events_recorder import same

SECONDS = 20.0


class Rank:
    """An index with its recorder and publisher, as rank 0 of a group has them."""

    def __init__(self, folder: Path, *, name: str = "events", first: int | None = None, **options: object) -> None:
        self.kit = Kit(page=2, device=8192, host=8192)
        self.recorder = EventRecorder(self.kit.index)
        chosen: dict[str, object] = {
            "endpoint": f"ipc://{folder}/{name}",
            "replay_endpoint": f"ipc://{folder}/{name}-replay",
            "topic": "kv-events",
        }
        self.publisher = KVEventPublisher(PublisherOptions(**(chosen | options)), first_sequence=first)
        self.number = 0
        self.step()

    def step(self, kind: type[RecordedBatch] = RecordedBatch) -> int:
        """One step in which new pages come; its sequence number."""
        self.number += 1
        self.kit.put(self.number, self.number, self.number + 1, 7)
        recorded = self.recorder.take()
        assert isinstance(recorded, RecordedBatch)
        return self.publisher.publish(kind(*recorded))


@contextmanager
def rank(folder: Path, **options: object) -> Iterator[Rank]:
    started = Rank(folder, **options)
    try:
        yield started
    finally:
        started.publisher.close()


def subscriber(to: Rank, *, replays: bool = True, topic: str = "kv-events") -> KVEventSubscriber:
    publisher = to.publisher
    return KVEventSubscriber(publisher.endpoint, publisher.replay_endpoint if replays else "", topic=topic)


def drain_until(receiving: KVEventSubscriber, last: int, log: EventIndex | None = None) -> list[int]:
    """Receives up to the batch of that number; their numbers."""
    numbers: list[int] = []
    while not numbers or numbers[-1] < last:
        numbered = receiving.receive(SECONDS)
        assert numbered is not None, f"batch {last} did not come"
        if log is not None:
            log.apply(numbered.batch)
        numbers.append(numbered.sequence)
    return numbers


def joined(to: Rank, receiving: KVEventSubscriber) -> int:
    """Publishes until the subscriber's stream has begun: what is sent before is not for it. The last number."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        number = to.step()
        if receiving.receive(0.2) is not None:
            drain_until(receiving, number) if receiving.expected != number + 1 else None
            return number
    raise AssertionError("the subscriber never got anything")


def test_a_subscriber_that_comes_late_reads_the_log_from_its_beginning(tmp_path: Path) -> None:
    with rank(tmp_path, first=0) as publishing:
        for _ in range(5):
            publishing.step()
        log = EventIndex()
        with subscriber(publishing) as receiving:
            assert drain_until(receiving, 5, log) == list(range(6))
            same(log, publishing.kit.index)
            last = publishing.step()
            assert drain_until(receiving, last, log)[-1] == last
            same(log, publishing.kit.index)
            assert receiving.replayed >= 6


class Relay:
    """Stands between a publisher's stream and one subscriber, and passes nothing on while `losing`."""

    def __init__(self, to: Rank, endpoint: str) -> None:
        self.endpoint = endpoint
        self.subscribed = threading.Event()
        self.losing = False
        self.passed = 0
        self.lost: list[int] = []
        self._closed = False
        self._from = zmq.Context.instance().socket(zmq.SUB)
        self._from.setsockopt(zmq.SUBSCRIBE, b"")
        self._from.connect(to.publisher.endpoint)
        self._to = zmq.Context.instance().socket(zmq.XPUB)
        self._to.bind(endpoint)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._closed = True
        self._thread.join()
        self._from.close(0)
        self._to.close(0)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._from, zmq.POLLIN)
        poller.register(self._to, zmq.POLLIN)
        while not self._closed:
            ready = dict(poller.poll(20))
            if self._to in ready:
                self._to.recv()
                self.subscribed.set()
            if self._from in ready:
                frames = self._from.recv_multipart()
                if self.losing:
                    self.lost.append(int.from_bytes(frames[1], "big"))
                else:
                    self._to.send_multipart(frames)
                    self.passed += 1


@contextmanager
def relayed(to: Rank, folder: Path) -> Iterator[tuple[Relay, KVEventSubscriber]]:
    """A subscriber whose stream comes by way of a relay; what is published from here on passes the relay."""
    relay = Relay(to, f"ipc://{folder}/relay")
    try:
        with KVEventSubscriber(relay.endpoint, to.publisher.replay_endpoint, topic="kv-events") as receiving:
            assert relay.subscribed.wait(SECONDS)
            yield relay, receiving
    finally:
        relay.close()


def test_the_beginning_is_asked_for_also_when_the_stream_is_first(tmp_path: Path) -> None:
    with rank(tmp_path, first=50) as publishing, relayed(publishing, tmp_path) as (relay, receiving):
        wait_for(lambda: relay.passed > 0 or publishing.step() < 0, "the stream to begin")
        time.sleep(0.1)  # until it is there: the subscriber asks at once where it finds nothing
        last = publishing.step()
        assert drain_until(receiving, last) == list(range(50, last + 1))


def test_a_gap_is_filled_by_a_replay(tmp_path: Path) -> None:
    with rank(tmp_path, first=100) as publishing, relayed(publishing, tmp_path) as (relay, receiving):
        last = joined(publishing, receiving)
        relay.losing = True
        missed = [publishing.step() for _ in range(3)]
        wait_for(lambda: relay.lost[-3:] == missed, "the relay to lose them")  # maybe after one sent before
        relay.losing = False
        assert drain_until(receiving, publishing.step()) == [last + 1, *missed[1:], missed[-1] + 1]


def test_what_is_missed_before_a_silence_is_asked_for(tmp_path: Path) -> None:
    with rank(tmp_path, first=100) as publishing, relayed(publishing, tmp_path) as (relay, receiving):
        joined(publishing, receiving)
        relay.losing = True
        assert drain_until(receiving, publishing.step())


def test_a_gap_that_nothing_fills_is_said_and_the_stream_goes_on(tmp_path: Path) -> None:
    with rank(tmp_path, first=10) as publishing, subscriber(publishing, replays=False) as receiving:
        last = joined(publishing, receiving)
        publishing.publisher.next_sequence += 2
        number = publishing.step()
        with pytest.raises(SequenceGap, match=f"event batches {last + 1} to {last + 2} are lost") as gap:
            receiving.receive(SECONDS)
        assert (gap.value.expected, gap.value.received) == (last + 1, number)
        numbered = receiving.receive(SECONDS)
        assert isinstance(numbered, NumberedBatch) and numbered.sequence == number


class Slow(RecordedBatch):
    """A batch that the publisher's thread works at until it may `go_on`."""

    begun, go_on = threading.Event(), threading.Event()

    def batch(self) -> EventBatch:
        self.begun.set()
        assert self.go_on.wait(SECONDS)
        return super().batch()


def test_what_the_queue_has_no_room_for_is_lost_with_its_number(tmp_path: Path) -> None:
    with rank(tmp_path, first=0, queued_batches=2) as publishing:
        publisher = publishing.publisher
        numbers = [publishing.step(Slow)]
        assert Slow.begun.wait(SECONDS)
        numbers += [publishing.step() for _ in range(4)]
        Slow.go_on.set()
        assert numbers == list(range(1, 6)) and publisher.lost == 2
        with subscriber(publishing) as receiving:
            assert drain_until(receiving, 3) == [0, 1, 2, 3]
            publishing.step()
            with pytest.raises(SequenceGap, match="event batches 4 to 5 are lost"):
                receiving.receive(SECONDS)


def test_a_restarted_publisher_is_a_gap_that_its_first_batch_heals(tmp_path: Path) -> None:
    """Its numbers come from the clock, so none is repeated, and its log begins with the clearing of every tier."""
    log = EventIndex()
    with rank(tmp_path) as first:
        receiving = subscriber(first)
        drain_until(receiving, first.step(), log)
        seen = receiving.expected
    assert seen is not None
    with rank(tmp_path) as second, receiving:
        deadline = time.monotonic() + SECONDS
        while receiving.expected == seen and time.monotonic() < deadline:
            second.step()
            numbered = receiving.receive(0.2)
            if numbered is not None:
                log.apply(numbered.batch)
        assert receiving.expected is not None and receiving.expected > seen
        drain_until(receiving, second.step(), log)
        same(log, second.kit.index)


def test_a_subscriber_written_for_vllm_sees_its_three_frames(tmp_path: Path) -> None:
    with rank(tmp_path, first=0) as publishing:
        asked = zmq.Context.instance().socket(zmq.DEALER)
        asked.connect(publishing.publisher.replay_endpoint)
        stream = zmq.Context.instance().socket(zmq.SUB)
        stream.setsockopt_string(zmq.SUBSCRIBE, "kv-")
        stream.connect(publishing.publisher.endpoint)
        deadline = time.monotonic() + SECONDS
        events: list[list[object]] = [["AllBlocksCleared"]]
        while events[0][0] != "BlockStored" and time.monotonic() < deadline:
            publishing.step()
            if stream.poll(100):
                topic, sequence, payload = stream.recv_multipart()
                stamp, events, data_parallel_rank = msgpack.unpackb(payload)
        assert topic == b"kv-events" and len(sequence) == 8 and data_parallel_rank == 0
        assert abs(stamp - time.time()) < 3600 and events[0][0] == "BlockStored" and events[0][6] == "GPU"
        last = publishing.step()
        replayed = []
        asked.send_multipart((b"", (0).to_bytes(8, "big")))
        while asked.poll(int(SECONDS * 1000)):
            empty, number, payload = asked.recv_multipart()
            assert empty == b""
            if number == END_OF_REPLAY:
                assert payload == b""
                break
            replayed.append(int.from_bytes(number, "big"))
        assert replayed[: last + 1] == list(range(last + 1))
        stream.close(0)
        asked.close(0)


def test_only_the_kept_batches_are_replayed(tmp_path: Path) -> None:
    with rank(tmp_path, first=0, kept_batches=3) as publishing:
        last = [publishing.step() for _ in range(9)][-1]
        wait_for(lambda: publishing.publisher.published == last + 1, "all to be sent")
        with subscriber(publishing) as receiving:
            assert drain_until(receiving, last) == [last - 2, last - 1, last]


@pytest.mark.parametrize("frames", [[b"", b"short"], [b"x" * 8], [b"", b"\0" * 8, b"more"]])
def test_a_bad_replay_request_is_ignored_and_good_ones_are_answered(tmp_path: Path, frames: list[bytes]) -> None:
    with rank(tmp_path, first=0) as publishing:
        asked = zmq.Context.instance().socket(zmq.DEALER)
        asked.connect(publishing.publisher.replay_endpoint)
        asked.send_multipart(frames)
        asked.close(1000)
        with subscriber(publishing) as receiving:
            assert drain_until(receiving, publishing.step())[0] == 0


def test_a_batch_that_can_not_be_encoded_is_a_gap_and_the_thread_goes_on(tmp_path: Path) -> None:
    with rank(tmp_path, first=0) as publishing:
        publishing.publisher.publish(None)
        last = publishing.step()
        with subscriber(publishing) as receiving:
            assert receiving.receive(SECONDS) is not None
            with pytest.raises(SequenceGap, match="event batches 1 to 1 are lost"):
                receiving.receive(SECONDS)
            assert drain_until(receiving, last) == [2]
        assert publishing.publisher.lost == 1


def test_a_message_that_is_no_batch_is_named_and_passed(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/strange"
    stream = zmq.Context.instance().socket(zmq.PUB)
    stream.bind(endpoint)
    with KVEventSubscriber(endpoint) as receiving:

        def raised(message: list[bytes]) -> str:
            deadline = time.monotonic() + SECONDS
            while time.monotonic() < deadline:
                stream.send_multipart(message)
                try:
                    receiving.receive(0.1)
                except EventFormatError as error:
                    return str(error)
            raise AssertionError("nothing came")

        assert "a message of 1 frames" in raised([b"", b"x"])
        assert "event batch 3: no msgpack" in raised([b"", (3).to_bytes(8, "big"), b"\xc1"])
    stream.close(0)


def bad(endpoint: str) -> Callable[[], object]:
    return lambda: KVEventPublisher(PublisherOptions(endpoint=endpoint))


def test_an_endpoint_that_can_not_be_used_is_refused_with_advice() -> None:
    taken = KVEventPublisher(PublisherOptions(endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*"))
    try:
        assert taken.endpoint.startswith("tcp://127.0.0.1:") and not taken.endpoint.endswith("*")
        assert taken.replay_endpoint.rsplit(":")[-1].isdigit()
        with pytest.raises(EventPublisherError, match="Address already in use; give every group its own"):
            KVEventPublisher(PublisherOptions(endpoint="tcp://127.0.0.1:*", replay_endpoint=taken.replay_endpoint))
        for endpoint in ("floppy://*", "tcp://*:notaport", ""):
            with pytest.raises(EventPublisherError, match="KV events can't be published at"):
                bad(endpoint)()
    finally:
        taken.close()
        taken.close()
    with pytest.raises(RuntimeError, match="closed"):
        taken.publish(RecordedBatch(0.0, (), 1, False))


def test_events_can_be_connected_to_a_collector(tmp_path: Path) -> None:
    """An endpoint without a wildcard is connected to, as vLLM does: many ranks, one collector."""
    collector = zmq.Context.instance().socket(zmq.SUB)
    port = collector.bind_to_random_port("tcp://127.0.0.1")
    collector.setsockopt(zmq.SUBSCRIBE, b"")
    with rank(tmp_path, endpoint=f"tcp://127.0.0.1:{port}") as publishing:
        deadline = time.monotonic() + SECONDS
        while not collector.poll(100) and time.monotonic() < deadline:
            publishing.step()
        assert collector.recv_multipart()[0] == b"kv-events"
    collector.close(0)


def test_stored_events_reach_the_wire_with_their_tokens(tmp_path: Path) -> None:
    with rank(tmp_path, first=0) as publishing, subscriber(publishing) as receiving:
        numbered = receiving.receive(SECONDS)
        assert numbered is not None and numbered.batch.begins_anew
        stored = next(event for event in numbered.batch.events if isinstance(event, BlockStored))
        assert stored.medium == GPU and stored.token_ids == (1, 1, 2, 7)
