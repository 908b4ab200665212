"""The built-in workload: a chat service with a shared system prompt and conversations that grow.

`chat:sessions=50,turns=6,system=512,turn=64,answer=64` makes 300 requests. Each prompt is the system prompt, then all
turns and answers of its conversation so far, then a new turn. Which conversation goes on next is drawn at random among
those that have turns left, so the time between two turns of one conversation varies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import islice

import numpy as np

from hicache_ray.hashing import EMPTY_NAMESPACE, Namespace
from hicache_ray.replay.requests import ReplayRequest, TokenArray, Workload

NAME = "chat"
PREFIX = f"{NAME}:"
VOCABULARY = 128_000
"""Token ids are drawn below this."""

MAX_TOKENS = 1 << 24
MAX_COUNT = 1 << 20

MAX_REQUESTS = 10_000_000
MAX_TOTAL_TOKENS = 2_000_000_000
"""Most requests of a workload, and tokens of all its prompts and answers: several hours of a replay."""


class ChatSpecError(ValueError):
    """A chat specification that makes no workload; the text names the field and what would work."""


@dataclass(frozen=True)
class ChatSpec:
    """Shape of the workload.

    Attributes:
        sessions: conversations.
        turns: requests a conversation.
        system: tokens of the system prompt, the same for all conversations.
        turn: tokens a user's turn has on average; drawn between half and one and a half of it.
        answer: the same for the model's answers.
        tenants: the conversations are dealt out to so many tenants, which must share no KV; 0: no tenants.
        seed: of everything that is drawn; None: the seed of the run.
    """

    sessions: int = 50
    turns: int = 6
    system: int = 512
    turn: int = 64
    answer: int = 64
    tenants: int = 0
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, least, most in (
            ("sessions", 1, MAX_COUNT),
            ("turns", 1, MAX_COUNT),
            ("system", 0, MAX_TOKENS),
            ("turn", 1, MAX_TOKENS),
            ("answer", 0, MAX_TOKENS),
            ("tenants", 0, MAX_COUNT),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise ChatSpecError(f"{PREFIX}{name}={value}: expected {least} to {most}")
        for count, what, bound in (
            (self.requests, "requests", MAX_REQUESTS),
            (self.tokens, "tokens", MAX_TOTAL_TOKENS),
        ):
            if count > bound:
                raise ChatSpecError(
                    f"{PREFIX}sessions={self.sessions},turns={self.turns}: makes {count} {what}, and "
                    f"{bound} is the most: give fewer sessions or turns, or shorter ones"
                )
        if self.seed is not None and self.seed < 0:
            raise ChatSpecError(f"{PREFIX}seed={self.seed}: expected a number from 0")

    @property
    def requests(self) -> int:
        """Requests the workload has."""
        return self.sessions * self.turns

    @property
    def tokens(self) -> int:
        """Tokens of all prompts and answers, on average over the seeds."""
        grown = (self.turn + self.answer) * self.turns * (self.turns + 1) // 2
        return self.sessions * (self.system * self.turns + grown)

    @classmethod
    def parse(cls, text: str) -> ChatSpec:
        """Reads "chat", or "chat:sessions=50,turns=6"; what is not named keeps its default.

        Raises:
            ChatSpecError: an unknown or repeated field, or a value that is no number in its range.
        """
        known = [entry.name for entry in fields(cls)]
        values: dict[str, int] = {}
        for part in filter(None, text.removeprefix(NAME).removeprefix(":").split(",")):
            name, equals, value = (piece.strip() for piece in part.partition("="))
            if name not in known or not equals:
                raise ChatSpecError(f"{PREFIX}{part}: expected name=number with one of {', '.join(known)}")
            if name in values:
                raise ChatSpecError(f"{PREFIX}{part}: {name} is given twice")
            try:
                values[name] = int(value)
            except ValueError:
                raise ChatSpecError(f"{PREFIX}{part}: {value!r} is no whole number") from None
        return cls(**values)


def chat_workload(source: str, limit: int | None, seed: int) -> Workload:
    """The first `limit` requests (None: all) of the chat that `source` specifies; ChatSpecError for a bad one."""
    spec = ChatSpec.parse(source)
    total = spec.requests if limit is None else min(limit, spec.requests)
    return Workload.of(source, total, lambda: islice(chat_requests(spec, seed), total))


def chat_requests(spec: ChatSpec, seed: int) -> Iterator[ReplayRequest]:
    """The requests of the workload in order of arrival; the same spec and seed give the same requests."""
    rng = np.random.default_rng((0xC4A7, seed if spec.seed is None else spec.seed))
    histories = [_draw(rng, spec.system)] * spec.sessions
    turns_done = [0] * spec.sessions
    open_sessions = list(range(spec.sessions))
    while open_sessions:
        at = int(rng.integers(len(open_sessions)))
        session = open_sessions[at]
        turn = turns_done[session]
        prompt = np.concatenate([histories[session], _draw(rng, _around(rng, spec.turn))])
        output = _draw(rng, _around(rng, spec.answer))
        yield ReplayRequest(
            rid=f"s{session}t{turn}",
            prompt=prompt,
            output=output,
            namespace=Namespace(tenant=f"tenant{session % spec.tenants}") if spec.tenants else EMPTY_NAMESPACE,
            after=f"s{session}t{turn - 1}" if turn else None,
        )
        histories[session] = np.concatenate([prompt, output])
        turns_done[session] += 1
        if turns_done[session] == spec.turns:
            open_sessions.pop(at)
            histories[session] = prompt[:0].copy()  # a view would keep the prompt


def _around(rng: np.random.Generator, mean: int) -> int:
    return int(rng.integers(mean - mean // 2, mean + mean // 2 + 1))


def _draw(rng: np.random.Generator, tokens: int) -> TokenArray:
    return rng.integers(VOCABULARY, size=tokens, dtype=np.uint32)
