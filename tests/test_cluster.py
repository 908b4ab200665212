"""Which Ray cluster is used: bad addresses and a Ray that does not start end with one sentence, signals end cleanly."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator

import pytest

from hicache_ray.actors.cluster import RayAddressError, RayStart, RayStartError, check_ray_address, enter, join
from hicache_ray.cli import run

ray = pytest.importorskip("ray")

MALFORMED = (
    *("garbage", "127.0.0.1:abc", "127.0.0.1:0", "127.0.0.1:65536", "127.0.0.1:", ":6379", "127.0.0.1", " ", "a b:1"),
    *(
        "http://127.0.0.1:6379",
        "ray://",
        "ray://127.0.0.1",
        "ray://127.0.0.1:x",
        "ray://u@h:1",
        "::1",
        "h:1/x",
        "h:\u0663",
    ),
)


@pytest.fixture
def listener() -> Iterator[int]:
    """A port at which something accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("address", MALFORMED)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(RayAddressError, match="is no address of a Ray cluster: give HOST:PORT"):
        check_ray_address(address)


@pytest.mark.parametrize("prefix", ["", "ray://"])
def test_an_address_where_nothing_answers_is_refused(listener: int, prefix: str) -> None:
    check_ray_address(f"{prefix}127.0.0.1:{listener}")
    for host in ("127.0.0.1:1", "a..b:1"):
        with pytest.raises(RayAddressError, match="no Ray cluster answers at"):
            check_ray_address(prefix + host)


def test_words_are_addresses() -> None:
    check_ray_address("auto")
    check_ray_address("local")


@pytest.mark.parametrize("command", [["replay", "chat:sessions=1"], ["demo"], ["chaos"]])
@pytest.mark.parametrize("address", ["garbage", "ray://127.0.0.1:1"])
def test_a_wrong_address_ends_a_command_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str], address: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    assert run(command) == 2
    err = capsys.readouterr().err
    assert err.startswith("hicache-ray: ") and address in err and err.count("\n") == 1


def test_auto_stands_for_the_address_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "garbage")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    for use in (lambda: enter("auto", RayStart()), lambda: join("auto"), lambda: join(None)):
        with pytest.raises(RayAddressError, match="'garbage' is no address"):
            use()


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """What `ray.init` raises, to be filled by the test; Ray itself is left alone."""
    errors: list[BaseException] = []

    def init(**options: object) -> None:
        raise errors[0]

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray, "init", init)
    return errors


@pytest.mark.parametrize(
    "error", [Exception("The current node timed out\nduring startup."), RuntimeError("no port"), ValueError("store")]
)
def test_a_ray_that_does_not_start_is_said_in_one_sentence(
    failing: list[BaseException], capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    failing.append(error)
    with pytest.raises(RayStartError, match="Ray did not start on this machine: "):
        enter(None, RayStart())
    for command in (["replay", "chat:sessions=1"], ["demo"], ["chaos"]):
        assert run(command) == 1
        captured = capsys.readouterr().err
        reason = " ".join(str(error).split())
        assert captured == f"hicache-ray: Ray did not start on this machine: {reason}\n"


def test_no_cluster_for_auto_is_said_as_an_address_that_does_not_answer(failing: list[BaseException]) -> None:
    failing.append(ConnectionError("Could not find any\nrunning Ray instance."))
    with pytest.raises(
        RayAddressError, match="no Ray cluster answers at auto: Could not find any running Ray instance"
    ):
        join(None)


def test_the_handler_of_the_process_survives_that_of_ray(
    monkeypatch: pytest.MonkeyPatch, failing: list[BaseException]
) -> None:
    def own(*_: object) -> None:
        """What the process does at SIGTERM."""

    monkeypatch.setattr(ray, "init", lambda **_: signal.signal(signal.SIGTERM, signal.SIG_IGN))
    before = signal.signal(signal.SIGTERM, own)
    try:
        assert enter(None, RayStart())
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """An interrupt raises KeyboardInterrupt, also where the tests run in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupt_waits_until_ray_has_started_and_a_second_one_does_not(
    monkeypatch: pytest.MonkeyPatch, failing: list[BaseException], times: int
) -> None:
    started, ended = [], []

    def init(**options: object) -> None:
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)
        started.append(True)

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: ended.append(True))
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        enter(None, RayStart())
    assert len(started) == 2 - times and ended == [True] and signal.getsignal(signal.SIGINT) is before
