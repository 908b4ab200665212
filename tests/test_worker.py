"""Background threads: jobs in order, no exception ends one (docs/design.md 5)."""

from __future__ import annotations

import logging
import threading

import pytest

from hicache_ray.threads import Worker

DEADLINE = 10.0


def test_jobs_run_in_order() -> None:
    worker, seen = Worker("order"), []
    for i in range(100):
        worker.submit("append", lambda i=i: seen.append(i))
    assert worker.wait_idle(DEADLINE)
    assert seen == list(range(100))
    assert worker.close(DEADLINE)


def test_a_job_that_raises_is_counted_logged_once_and_the_next_one_runs(caplog: pytest.LogCaptureFixture) -> None:
    worker, done = Worker("faulty"), threading.Event()

    def fail() -> None:
        raise OSError("disk is gone")

    with caplog.at_level(logging.ERROR, "hicache_ray.rank.lanes"):
        for _ in range(3):
            worker.submit("read", fail)
        worker.submit("read", done.set)
        assert done.wait(DEADLINE) and worker.wait_idle(DEADLINE)
    assert worker.alive and worker.failures == {"read": 3}
    assert len(caplog.records) == 1
    worker.close(DEADLINE)


def test_closing_drops_what_has_not_begun_and_refuses_more() -> None:
    worker, release, begun, late = Worker("closing"), threading.Event(), threading.Event(), threading.Event()
    worker.submit("hold", lambda: (begun.set(), release.wait(DEADLINE)))
    worker.submit("late", late.set)
    assert begun.wait(DEADLINE)
    assert not worker.close(0.01)
    with pytest.raises(RuntimeError, match="closed"):
        worker.submit("more", late.set)
    release.set()
    assert worker.close(DEADLINE) and not worker.alive and not late.is_set()
