"""Commands on a live group: flush, attach, detach, policies, clear, status, audit (case 61).

Each travels in a step of its own, so all ranks carry it out at the same point; a command that waits for transfers is
sent again until they have ended. Nothing here needs to own the group: whoever else steps it goes on meanwhile.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from hicache_ray.actors.errors import GroupRestarted
from hicache_ray.config.extra import PREFETCH_KEYS, parse_extra_config
from hicache_ray.rank.control import DONE, DRAINING, REFUSED, ControlRefused, ControlTimeout, checked_policies
from hicache_ray.rank.step import Control, GroupAnswer

logger = logging.getLogger("hicache_ray.group")

CONTROL_TIMEOUT = 60.0
"""Seconds within which a command has to be through, what it waits for included."""

POLL_SECONDS = 0.01


class RuntimeControl:
    """The commands, for a class that can step a group and call its ranks."""

    name: str

    @abstractmethod
    def step(self, *, aborts: Sequence[str] = (), controls: Sequence[Control] = ()) -> GroupAnswer:
        """One step of the group; see `TPGroup.step`."""

    @abstractmethod
    def _call(self, method: str, *arguments: Any, timeout: float | None = None) -> list[Any]:
        """Calls a method of every rank, beside the steps; the answers in rank order."""

    def flush(self, *, timeout: float = CONTROL_TIMEOUT) -> str:
        """Drops everything in L1 and L2; L3 stays. What is in flight ends first.

        This and the other commands return a note about what was done, mostly "".

        Raises:
            ControlRefused: requests are running.
            ControlTimeout: transfers did not end within `timeout` seconds.
            GroupError: the group is broken and nobody rebuilds it.
        """
        return self._carry(Control("flush"), timeout)

    def attach(
        self,
        backend: str,
        options: str | Mapping[str, Any] | None = None,
        *,
        timeout: float = CONTROL_TIMEOUT,
        **policies: Any,
    ) -> str:
        """Begins to use an L3 backend, on all ranks or on none. The attached one again, with its options or none:
        only the policies change.

        Args:
            backend: its registered name.
            options: as `hicache_storage_backend_extra_config`: a mapping, JSON text, or @ and a file here; the prefetch
                options among them count as policies.
            timeout: seconds until it has to be in use.
            policies: as `set_policies`.

        Raises:
            ControlRefused: another backend is attached, or this one with other options; or a policy, an option or the
                backend can't be had; nothing changed.
            ControlTimeout, GroupError: as `flush`.
        """
        chosen, given = _options(options, policies)
        ticket = secrets.token_hex(8)
        deadline = time.monotonic() + timeout
        refusals = [text for text in self._call("prepare_storage", ticket, backend, chosen, timeout=timeout) if text]
        if refusals:
            self._call("discard_storage", ticket)
            raise ControlRefused(f"attach: {_one(refusals)}")
        try:
            self._carry(
                Control("attach", {"backend": backend, "options": chosen, "ticket": ticket, "hold": True}),
                deadline - time.monotonic(),
            )
        except ControlRefused as refused:
            self._call("discard_storage", ticket)
            if refused.partly:
                self._carry(Control("detach"), CONTROL_TIMEOUT)
            raise
        return self._carry(Control("resume", given), deadline - time.monotonic())

    def detach(self, *, timeout: float = CONTROL_TIMEOUT) -> str:
        """Stops using L3; what is in flight to it ends first. Policies stay, also for the next attach. Done also when
        none is attached.

        Raises: as `flush`; a detach that timed out goes on with the next one, and ends with an attach of the backend.
        """
        return self._carry(Control("detach"), timeout)

    def abort(self, rids: Sequence[str] | None = None) -> str:
        """Ends requests in whatever state, keeping nothing of them. Ids that are not there (any more) are passed over.

        Args:
            rids: None: all there are, also those of drivers that died: nobody else will end these.

        Raises:
            GroupError: as `flush`.
        """
        there = self.status()[0]["requests"]["ids"]
        ended = [rid for rid in there if rids is None or rid in rids]
        try:
            self.step(aborts=ended)
        except GroupRestarted as restarted:
            logger.info("group %s: its requests are gone: %s", self.name, restarted)
        return f"{len(ended)} requests"

    def set_policies(self, **policies: Any) -> str:
        """Changes policies from now on.

        Args:
            policies: `write_policy`, `prefetch_policy`, `prefetch_threshold` (tokens), `prefetch_timeout_base` and
                `prefetch_timeout_per_ki_token` (seconds), `pass_prefix_keys`, or the configuration's names of them.

        Raises:
            ControlRefused: an unknown policy, or a value of the wrong type or out of range; nothing changed.
            GroupError: as `flush`.
        """
        return self._carry(Control("policies", _checked(policies)), CONTROL_TIMEOUT)

    def clear_storage(self, *, everything: bool = False) -> str:
        """Drops this model's pages from L3, or with `everything` those of all models.

        Raises:
            ControlRefused: no backend is attached, or it did not clear (the text says on which ranks).
            GroupError: as `flush`.
        """
        return self._carry(Control("clear_storage", {"everything": everything}), CONTROL_TIMEOUT)

    def status(self) -> list[dict[str, Any]]:
        """State of every rank, by rank (`inspection.status_of`), with `pid` and `node_id`."""
        return self._call("status")

    def metrics(self) -> list[dict[str, Any]]:
        """Metrics of every rank, by rank; `metrics.exposition` makes Prometheus text of them."""
        return self._call("snapshot")

    def audit(self) -> list[dict[str, Any]]:
        """Audit of every rank, by rank (`inspection.RankAudit`); `faults` says what does not add up. Replicas are
        compared where all ranks were counted at the same step."""
        audits: list[dict[str, Any]] = self._call("audit")
        first = audits[0]
        for other in audits[1:]:
            together = other["next_step"] == first["next_step"]
            differ = [name for name in ("digest", "pages") if other[name] != first[name]]
            if together and differ:
                ranks = f"ranks {first['rank']} and {other['rank']}"
                other["faults"] = (*other["faults"], f"{ranks} differ in {' and '.join(differ)}")
        return audits

    def _carry(self, control: Control, timeout: float) -> str:
        """Sends a command until no rank waits any more; returns the ranks' note."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                answers = [answer[0] for answer in self.step(controls=[control]).controlled]
            except GroupRestarted as restarted:
                logger.info("group %s: %s again: %s", self.name, control.name, restarted)
                answers = [[DRAINING, ""]]
            states = {state for state, _ in answers}
            if REFUSED in states:
                refusals = [text for state, text in answers if state == REFUSED]
                raise ControlRefused(_one(refusals), partly=DONE in states)
            if DRAINING not in states:
                return next((text for _, text in answers if text), "")
            if time.monotonic() > deadline:
                raise ControlTimeout(f"group {self.name}: {control.name} still waits for transfers after {timeout:g} s")
            threading.Event().wait(POLL_SECONDS)


def _options(
    options: str | Mapping[str, Any] | None, policies: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The backend's own options, and the policies with those among the options."""
    try:
        chosen = parse_extra_config(options)
    except ValueError as error:
        raise ControlRefused(f"attach: {error}") from None
    among = {name: chosen.pop(name) for name in PREFETCH_KEYS if name in chosen}
    return chosen, {**_checked(among), **_checked(policies)}


def _checked(policies: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return checked_policies(policies)
    except ValueError as error:
        raise ControlRefused(f"policies: {error}") from None


def _one(texts: Sequence[str]) -> str:
    """The texts of several ranks as one sentence: ranks mostly say the same."""
    return "; ".join(dict.fromkeys(texts))
