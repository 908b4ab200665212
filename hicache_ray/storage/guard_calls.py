"""Threads that carry one call each and may be left behind with it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from hicache_ray.storage.base import Slots


class Call:
    """One call under way. `answer` or `error` is set when `ended`."""

    def __init__(self, function: Callable[[], Any], slots: Slots | None) -> None:
        self.slots = np.empty(0, dtype=np.int64) if slots is None else np.array(slots, dtype=np.int64)
        self.answer: Any = None
        self.error: Exception | None = None
        self.ended = False
        self.given_up = False
        self._function: Callable[[], Any] | None = function

    def run(self) -> None:
        """Make the call; keeps what it gives or raises."""
        assert self._function is not None
        try:
            self.answer = self._function()
        except Exception as error:
            self.error = error
        finally:
            self._function = None


class _Waiting:
    """A callback and the number of given-up calls it waits for."""

    def __init__(self, callback: Callable[[], None], calls: int) -> None:
        self.callback = callback
        self.calls = calls


class CallThreads:
    """Daemon threads, one for each call under way; a thread whose call has ended takes the next one.

    There are as many threads as calls ever were under way at once: the caller bounds the calls it gives up.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next: list[Call] = []
        self._idle = 0
        self._closed = False
        self._left_behind: dict[Call, list[_Waiting]] = {}

    @property
    def given_up(self) -> int:
        """Calls given up that have not returned."""
        return len(self._left_behind)

    def start(self, function: Callable[[], Any], slots: Slots | None) -> Call:
        """Begin a call that touches the host slots `slots`; RuntimeError after `close`."""
        call = Call(function, slots)
        with self._changed:
            if self._closed:
                raise RuntimeError("the storage backend is closed: no call may follow")
            self._next.append(call)
            if self._idle < len(self._next):
                threading.Thread(target=self._run, name="hicache-l3-call", daemon=True).start()
            self._changed.notify_all()
        return call

    def wait(self, call: Call, timeout: float) -> bool:
        """True when the call ended within `timeout` seconds; else it is given up."""
        with self._changed:
            if not self._changed.wait_for(lambda: call.ended, timeout):
                call.given_up = True
                self._left_behind[call] = []
        return not call.given_up

    def when_returned(self, slots: Slots, callback: Callable[[], None]) -> None:
        """Run `callback` when no given-up call holds any of `slots`."""
        with self._changed:
            holders = [call for call in self._left_behind if np.isin(call.slots, slots).any()]
            waiting = _Waiting(callback, len(holders))
            for call in holders:
                self._left_behind[call].append(waiting)
        if not holders:
            callback()

    def held_slots(self) -> Slots:
        """Slots of the given-up calls, each once, ascending."""
        with self._changed:
            held = [call.slots for call in self._left_behind]
        return np.unique(np.concatenate(held)) if held else np.empty(0, dtype=np.int64)

    def close(self) -> None:
        """End the threads without a call; the others end with theirs."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                self._changed.wait_for(lambda: bool(self._next) or self._closed)
                self._idle -= 1
                if not self._next:
                    return
                call = self._next.pop(0)
            call.run()
            for waiting in self._end(call):
                waiting.callback()
            del call

    def _end(self, call: Call) -> list[_Waiting]:
        with self._changed:
            call.ended = True
            self._changed.notify_all()
            waiting = self._left_behind.pop(call, [])
            for entry in waiting:
                entry.calls -= 1
        return [entry for entry in waiting if not entry.calls]
