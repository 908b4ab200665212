"""Lanes and workers that a test advances itself: every interleaving of transfers can be played, and played again."""

from __future__ import annotations

from collections import Counter, deque

import torch

from hicache_ray.rank.lanes import Copy, CopyLane
from hicache_ray.threads import Job, Worker


class ManualLane(CopyLane):
    """A copy lane whose copies happen only in `advance`, or where the cache has to wait for them."""

    def __init__(self, device: torch.device, name: str) -> None:
        self.name = name
        self._pending: deque[Copy] = deque()
        self._done = 0

    def submit(self, copy: Copy) -> None:
        self._pending.append(copy)

    @property
    def pending(self) -> int:
        """Copies submitted and not yet made."""
        return len(self._pending)

    @property
    def done(self) -> int:
        return self._done

    def advance(self, copies: int = 1) -> None:
        """Makes the next copies, at most as many as are pending."""
        for _ in range(min(copies, len(self._pending))):
            self._pending.popleft()()
            self._done += 1

    def wait(self, timeout: float) -> bool:
        self.advance(len(self._pending))
        return True

    def close(self) -> None:
        self._pending.clear()


class ManualWorker(Worker):
    """A worker without a thread: its jobs run only in `advance`. Failures are counted as a worker counts them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.failures: Counter[str] = Counter()
        self._pending: deque[tuple[str, Job]] = deque()
        self._open = True

    @property
    def alive(self) -> bool:
        return self._open

    @property
    def pending(self) -> int:
        """Jobs submitted and not yet run."""
        return len(self._pending)

    def submit(self, kind: str, job: Job) -> None:
        if not self._open:
            raise RuntimeError(f"worker {self.name} is closed: {kind} can't be queued")
        self._pending.append((kind, job))

    def advance(self, jobs: int = 1) -> None:
        """Runs the next jobs, at most as many as are pending."""
        for _ in range(min(jobs, len(self._pending))):
            kind, job = self._pending.popleft()
            try:
                job()
            except Exception:
                self._count(kind)

    def wait_idle(self, timeout: float) -> bool:
        self.advance(len(self._pending))
        return True

    def close(self, timeout: float = 5.0) -> bool:
        self._open = False
        self._pending.clear()
        return True
