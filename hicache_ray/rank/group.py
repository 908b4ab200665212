"""A group of ranks as its driver sees it: one message to every rank, one answer from all, and the commands on a group.

`Group` builds the message, compares the ranks' answers and merges them. An `Exchange` carries the messages: to actors
(`actors.group`), or to ranks in this process (`rank.local_group`). A difference between the ranks is an error that
names the step and the ranks, never silence.
"""

from __future__ import annotations

import logging
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from hicache_ray.config.extra import PREFETCH_KEYS, parse_extra_config
from hicache_ray.deadline import Deadline, wait_until
from hicache_ray.rank.control import DONE, DRAINING, REFUSED, ControlRefused, ControlTimeout, checked_policies
from hicache_ray.rank.step import (
    NEXT_STEP,
    Admit,
    Agreed,
    Chunk,
    Control,
    Finish,
    Peek,
    StepAnswer,
    StepRequest,
)

logger = logging.getLogger("hicache_ray.group")

CONTROL_TIMEOUT = 60.0
"""Seconds within which a command has to be through, what it waits for included."""


class GroupError(RuntimeError):
    """A group can't answer; the text names the group, the step and what happened."""


class DivergenceError(GroupError):
    """Ranks answered one step differently: their replicas of the tree are no longer equal."""


class GroupRestarted(GroupError):
    """The group was rebuilt: requests that were in flight on it have to be sent again."""


class GroupAnswer(Agreed, frozen=True):
    """What a group answered to one step; `controlled` and `engine` by rank.

    `timings_us`: `total` (as the caller saw it); `reduction`, `work`, `engine` of the slowest rank; `message` is the
    rest: encoding, travel, decoding.
    """

    controlled: tuple[tuple[Any, ...], ...] = ()
    engine: tuple[dict[str, Any], ...] = ()
    timings_us: dict[str, float] = {}


class Exchange(ABC):
    """Carries messages and calls to the ranks of one group. Used by one thread at a time."""

    name: str
    """Of the group, for messages."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of ranks."""

    @property
    @abstractmethod
    def generation(self) -> int:
        """Which incarnation of the group the messages are for."""

    @abstractmethod
    def send(self, message: bytes) -> Sequence[StepAnswer]:
        """Gives every rank the same `StepRequest.encode()`. Returns their answers, in rank order.

        Every wait in it has a deadline. Each answer's `timings_us` has `reduction`, `work`, `engine` and their `total`.

        Raises:
            RequestError: the step can't be done; nothing was applied on any rank.
            GroupError: not every rank answered; the ranks may be at different points now.
        """

    @abstractmethod
    def call(self, method: str, *arguments: Any, timeout: float | None = None) -> list[Any]:
        """Calls a method of every rank, beside the steps. Returns the answers in rank order.

        Args:
            method: of `Rank`, or `snapshot`: its metrics.
            timeout: seconds; None: as long as a step may take.

        Raises:
            GroupError: not every rank answered in time.
            AssertionError: of `check_integrity`.
        """

    def rebuild(self) -> bool:
        """Brings ranks that are at different points back into step, without requests, as a new generation.

        False where nobody does that: the group stays broken.
        """
        return False

    @abstractmethod
    def close(self) -> None:
        """Ends the ranks. May be called twice; never raises for ranks already gone."""


class Group:
    """The ranks of one model instance, stepped together. An object of this class is not thread-safe; several drivers
    may each have one.

    Steps of several drivers are applied one after the other, each on all ranks or on none. A step that finds the group
    broken has it rebuilt and then raises GroupRestarted: requests that were in flight are gone, the next step works.
    If nobody rebuilds it, every later step raises the same error.
    """

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.broken: GroupError | None = None

    @property
    def name(self) -> str:
        """Of the group, for messages."""
        return self.exchange.name

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.exchange.size

    @property
    def generation(self) -> int:
        """How often it was rebuilt."""
        return self.exchange.generation

    def step(
        self,
        *,
        aborts: Sequence[str] = (),
        finishes: Sequence[Finish] = (),
        admits: Sequence[Admit] = (),
        polls: Sequence[str] = (),
        schedules: Sequence[str] = (),
        controls: Sequence[Control] = (),
        chunks: Sequence[Chunk] = (),
        peeks: Sequence[Peek] = (),
    ) -> GroupAnswer:
        """One scheduling iteration on all ranks.

        Raises:
            ProtocolError: a field of the step is not what it must be; nothing was sent.
            RequestError: the step names a request in a state in which that can't be done; nothing was applied anywhere.
            GroupRestarted: the group was broken and is rebuilt; send the requests again.
            GroupError: the group is broken and nobody rebuilds it; every later step fails too. A DivergenceError where
                ranks answered differently.
        """
        if self.broken is not None:
            raise self.broken
        began = time.perf_counter()
        message = StepRequest(
            self.generation,
            NEXT_STEP,
            aborts=tuple(aborts),
            finishes=tuple(finishes),
            admits=tuple(admits),
            polls=tuple(polls),
            schedules=tuple(schedules),
            controls=tuple(controls),
            chunks=tuple(chunks),
            peeks=tuple(peeks),
        ).encode()
        try:
            answers = self.exchange.send(message)
            check_agreement(self.name, answers)
        except GroupError as error:
            self._rebuild(error)
        return _merged(answers, (time.perf_counter() - began) * 1e6)

    def stats(self) -> list[dict[str, Any]]:
        """Counters of every rank, by rank."""
        return self.exchange.call("stats")

    def check_integrity(self) -> None:
        """Raises AssertionError when a rank's tree, allocators or ledger don't add up."""
        self.exchange.call("check_integrity")

    def stop(self) -> None:
        """Ends the ranks. May be called twice; never raises for ranks already gone."""
        self.exchange.close()
        self.broken = self.broken or GroupError(f"group {self.name} is stopped")

    # -- runtime control (case 61) -----------------------------------------------------------------------------------

    # Each command travels in a step of its own, so all ranks carry it out at the same point; one that waits for
    # transfers is sent again until they have ended. Whoever else steps the group goes on meanwhile.

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
        """Begins to use an L3 backend, on all ranks or on none. Naming the attached backend again, with the same
        options or none, changes only the policies.

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
        deadline = Deadline(timeout)
        refusals = self.exchange.call("prepare_storage", ticket, backend, chosen, timeout=timeout)
        if any(refusals):
            self.exchange.call("discard_storage", ticket)
            raise ControlRefused(f"attach: {_one(refusals)}")
        try:
            self._carry(
                Control("attach", {"backend": backend, "options": chosen, "ticket": ticket, "hold": True}),
                deadline.remaining(),
            )
        except ControlRefused as refused:
            self.exchange.call("discard_storage", ticket)
            if refused.partly:
                self._carry(Control("detach"), CONTROL_TIMEOUT)
            raise
        return self._carry(Control("resume", given), deadline.remaining())

    def detach(self, *, timeout: float = CONTROL_TIMEOUT) -> str:
        """Stops using L3; what is in flight to it ends first. Policies stay, also for the next attach. Done also when
        none is attached.

        Raises: as `flush`. A detach that timed out is continued by the next detach, and cancelled by attaching the
            backend again.
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
        """State of every rank, by rank (`rank.audit.status_of`), with `pid` and `node_id`."""
        return self.exchange.call("status")

    def metrics(self) -> list[dict[str, Any]]:
        """Metrics of every rank, by rank; `metrics.exposition` makes Prometheus text of them."""
        return self.exchange.call("snapshot")

    def audit(self) -> list[dict[str, Any]]:
        """Audit of every rank, by rank (`rank.audit.RankAudit`); `faults` says what does not add up. Replicas are
        compared where all ranks were counted at the same step."""
        audits: list[dict[str, Any]] = self.exchange.call("audit")
        first = audits[0]
        for other in audits[1:]:
            together = other["next_step"] == first["next_step"]
            differ = [name for name in ("digest", "pages") if other[name] != first[name]]
            if together and differ:
                ranks = f"ranks {first['rank']} and {other['rank']}"
                other["faults"] = (*other["faults"], f"{ranks} differ in {' and '.join(differ)}")
        return audits

    def _carry(self, control: Control, timeout: float) -> str:
        """Sends a command until no rank waits any more. Returns the ranks' note."""
        answers: list[Any] = []

        def is_through() -> bool:
            answers[:] = self._answers(control)
            return all(state != DRAINING for state, _ in answers)

        if not wait_until(is_through, timeout):
            raise ControlTimeout(f"group {self.name}: {control.name} still waits for transfers after {timeout:g} s")
        return next((text for _, text in answers if text), "")

    def _answers(self, control: Control) -> list[Any]:
        """The ranks' answers to a command. ControlRefused when one refuses."""
        try:
            answers = [answer[0] for answer in self.step(controls=[control]).controlled]
        except GroupRestarted as restarted:
            logger.info("group %s: %s again: %s", self.name, control.name, restarted)
            return [[DRAINING, ""]]
        states = {state for state, _ in answers}
        if REFUSED in states:
            refusals = [text for state, text in answers if state == REFUSED]
            raise ControlRefused(_one(refusals), partly=DONE in states)
        return answers

    def _rebuild(self, error: GroupError) -> NoReturn:
        """Has the group rebuilt and raises GroupRestarted; where nobody does that the group stays broken."""
        began = time.monotonic()
        if not self.exchange.rebuild():
            self.broken = error
            raise error
        took = time.monotonic() - began
        raise GroupRestarted(
            f"group {self.name} was rebuilt as generation {self.generation} in {took:.1f} s: {error}"
        ) from error


def check_agreement(group: str, answers: Sequence[StepAnswer]) -> None:
    """Raises DivergenceError naming the first two ranks whose answers differ in what all must agree on."""
    first = answers[0]
    for other in answers[1:]:
        differing = [name for name in Agreed.__struct_fields__ if getattr(first, name) != getattr(other, name)]
        if differing:
            raise DivergenceError(
                f"group {group}: ranks {first.rank} and {other.rank} differ at step {first.step} "
                f"in {', '.join(differing)}"
            )


def _merged(answers: Sequence[StepAnswer], total_us: float) -> GroupAnswer:
    slowest = max(answers, key=lambda answer: answer.timings_us["total"]).timings_us
    return GroupAnswer(
        **{name: getattr(answers[0], name) for name in Agreed.__struct_fields__},
        controlled=tuple(answer.controlled for answer in answers),
        engine=tuple(answer.engine for answer in answers),
        timings_us={
            **{part: slowest[part] for part in ("reduction", "work", "engine")},
            "message": max(0.0, total_us - slowest["total"]),
            "total": total_us,
        },
    )


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
    return "; ".join(dict.fromkeys(filter(None, texts)))
