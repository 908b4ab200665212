"""The circuit breaker on a clock that stands still (docs/design.md 7: a call, then a short refusal, then a probe)."""

from __future__ import annotations

from hicache_ray.storage.breaker import Breaker


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make() -> tuple[Breaker, Clock]:
    clock = Clock()
    return Breaker(1.0, 4.0, clock=clock), clock


def test_calls_pass_while_they_succeed() -> None:
    breaker, _ = make()
    for _ in range(3):
        assert breaker.allows()
        breaker.succeeded()
    assert not breaker.is_open


def test_a_failure_is_followed_by_refusals_then_one_probe() -> None:
    breaker, clock = make()
    breaker.failed()
    assert breaker.is_open and not breaker.allows()
    clock.now = 0.99
    assert not breaker.allows()
    clock.now = 1.0
    assert breaker.allows(), "the probe"
    assert not breaker.allows(), "one probe at a time"
    breaker.succeeded()
    assert breaker.allows() and not breaker.is_open


def test_failed_probes_double_the_refusal_up_to_its_limit() -> None:
    breaker, clock = make()
    breaker.failed()
    for refusal in (2.0, 4.0, 4.0):
        clock.now += 10
        assert breaker.allows()
        breaker.failed()
        clock.now += refusal - 0.01
        assert not breaker.allows()
    clock.now += 1
    assert breaker.allows()
    breaker.succeeded()
    breaker.failed()
    clock.now += 1.0
    assert breaker.allows(), "a success forgets the doubling"


def test_a_probe_that_never_reports_does_not_close_it_for_ever() -> None:
    breaker, clock = make()
    breaker.failed()
    clock.now = 1.0
    assert breaker.allows()
    clock.now = 4.9
    assert not breaker.allows()
    clock.now = 5.0
    assert breaker.allows()
