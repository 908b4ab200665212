"""The near channel: a storage actor's calls over a Unix socket, and what happens when an end of it goes away."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator

import pytest

from hicache_ray.storage.pool.channel import ChannelLost, ChannelTimeout
from hicache_ray.storage.pool.near import LONGEST_MESSAGE, METHODS, NearChannel, NearServer, fits
from tests.storage_local import in_threads


class Service:
    """Answers with what it was asked; `exists` waits until it is let go, `commit` breaks."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.ended: list[bytes] = []
        self.seen = threading.Event()

    def exists(self, message: bytes) -> bytes:
        self.let_go.wait(30)
        return message

    def reserve(self, message: bytes) -> bytes:
        return message[::-1]

    def acquire(self, message: bytes) -> bytes:
        return message * 1000

    def commit(self, message: bytes) -> bytes:
        raise KeyError(message)

    def release(self, message: bytes) -> bytes:
        self.ended.append(message)
        self.seen.set()
        return message

    def offer(self, message: bytes) -> bytes:
        return message


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def server(service: Service) -> Iterator[NearServer]:
    running = NearServer(service)
    yield running
    service.let_go.set()
    running.close()
    running.close()


def test_calls_and_answers_of_any_size(server: NearServer) -> None:
    channel = NearChannel(server.address, 5.0)
    for size in (1, 6000, LONGEST_MESSAGE - 1):
        message = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
        assert channel.call("reserve", message).result(5.0) == message[::-1]
    assert channel.call("acquire", b"a" * 131).result(5.0) == b"a" * 131_000
    channel.close()
    channel.close()


def test_calls_nobody_waits_for(server: NearServer, service: Service) -> None:
    channel = NearChannel(server.address, 5.0)
    channel.send("exists", b"late")
    service.let_go.set()
    channel.send("release", b"7")
    assert service.seen.wait(10)
    assert service.ended == [b"7"]
    assert channel.call("reserve", b"ab").result(5.0) == b"ba", "answers that nobody waits for are not sent"


def test_a_closed_server_answers_nobody_any_more(server: NearServer) -> None:
    """A pool that is stopped must not store another page over a connection that is still open."""
    channel = NearChannel(server.address, 5.0)
    assert channel.call("reserve", b"ab").result(5.0) == b"ba"
    server.close()
    with pytest.raises(ChannelLost):
        channel.call("reserve", b"ab").result(5.0)
    with pytest.raises(ChannelLost):
        NearChannel(server.address, 5.0)


def test_several_calls_at_once(server: NearServer, service: Service) -> None:
    channel = NearChannel(server.address, 5.0)
    waiting = channel.call("exists", b"first")
    assert channel.call("reserve", b"abc").result(5.0) == b"cba"
    service.let_go.set()
    assert waiting.result(5.0) == b"first"

    def ask(number: int) -> None:
        for step in range(100):
            message = b"%d %d" % (number, step)
            assert channel.call("reserve", message).result(5.0) == message[::-1]

    in_threads(ask, 4)


def test_silence_is_a_timeout_and_late_answers_go_nowhere(server: NearServer, service: Service) -> None:
    channel = NearChannel(server.address, 5.0)
    with pytest.raises(ChannelTimeout):
        channel.call("exists", b"late").result(0.05)
    service.let_go.set()
    assert channel.call("reserve", b"abc").result(5.0) == b"cba"
    assert not channel.lost


def test_an_answer_that_is_there_is_taken_without_time_left(server: NearServer) -> None:
    channel = NearChannel(server.address, 5.0)
    pending = channel.call("reserve", b"abc")
    assert select.select([pending._connection.socket], [], [], 30)[0]
    assert pending.result(0.0) == b"cba"


def test_a_method_that_breaks_cuts_the_client_off(server: NearServer) -> None:
    channel = NearChannel(server.address, 5.0)
    with pytest.raises(ChannelLost):
        channel.call("commit", b"x").result(5.0)
    assert channel.lost
    assert NearChannel(server.address, 5.0).call("reserve", b"ab").result(5.0) == b"ba", "the server goes on"


@pytest.mark.parametrize(
    "message", [bytes((len(METHODS),)), b"\xff", b"\0" * (LONGEST_MESSAGE + 1), b"\3" + b"x" * LONGEST_MESSAGE]
)
def test_nonsense_is_cut_off_and_the_server_goes_on(server: NearServer, message: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.settimeout(10)
        stranger.connect(f"\0{server.address}")
        stranger.send(message)
        assert stranger.recv(10) == b""
    assert NearChannel(server.address, 5.0).call("reserve", b"ab").result(5.0) == b"ba"


def test_nobody_listens() -> None:
    with pytest.raises(ChannelLost, match="no storage actor listens"):
        NearChannel("hicache-nobody", 1.0)


def test_an_actor_that_dies() -> None:
    """A listener whose process goes away: open calls fail at once, and so do new connections."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("\0hicache-test-dying")
    listener.listen()
    channel = NearChannel("hicache-test-dying", 5.0)
    end, _ = listener.accept()
    pending = channel.call("reserve", b"ab")
    end.close()
    listener.close()
    with pytest.raises(ChannelLost):
        pending.result(5.0)
    with pytest.raises(ChannelLost):
        channel.call("reserve", b"ab")
    channel.send("release", b"1")


def test_which_calls_fit() -> None:
    assert fits("reserve", (b"m",)) and fits("release", (b"m",)) and fits("exists", (b"m" * (LONGEST_MESSAGE - 1),))
    assert not fits("commit", (b"m", object())) and not fits("read", (b"m",)) and not fits("stats", ())
    assert not fits("exists", (b"m" * LONGEST_MESSAGE,)), "a longer call goes over Ray"
