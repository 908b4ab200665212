"""Random whole-cache runs: ranks in lockstep, transfers delayed at will, a store with faults.

After each step: equal answers and digests on all ranks, every page owned exactly once, one reduction, no wrong byte.
"""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest

from hicache_ray.config.names import PREFETCH_POLICIES, WRITE_POLICIES
from hicache_ray.hashing import EMPTY_NAMESPACE, Namespace
from hicache_ray.rank.control import DONE, DRAINING, REFUSED
from hicache_ray.rank.step import Admit, Chunk, Control, Finish, Peek
from tests.whole_cache import Lockstep, Shape, admit, tokens_of

SEQUENCES = int(os.environ.get("HICACHE_RANDOM_CACHE_SEQUENCES", "500"))
"""`make random` plays 2,000."""
STEPS, SHORT, LONG_EVERY = 90, 20, 10
"""Steps of a sequence: every tenth is long enough for its pages to come back from L3, the others are short."""
NAMESPACES = (EMPTY_NAMESPACE, Namespace(adapter="a"), Namespace(salt="s"))


def random_shape(rng: random.Random, seed: int) -> Shape:
    return Shape(
        ranks=rng.choice([1, 2, 2, 4]),
        page_size=rng.choice([1, 2, 4]),
        device_pages=rng.choice([12, 24, 40]),
        host_pages=rng.choice([8, 20, 40]),
        attention=rng.choice(["mha", "mla"]),
        layout=rng.choice(["layer_first", "page_first"]),
        write_policy=rng.choice(["write_through", "write_through_selective", "write_back"]),
        eviction_policy=rng.choice(["lru", "lfu", "fifo", "mru", "filo", "priority", "slru"]),
        prefetch_policy=rng.choice(["best_effort", "wait_complete", "timeout"]),
        storage=rng.random() < 0.8,
        bigram=rng.random() < 0.2,
        fault_chance=rng.choice([0.0, 0.0, 0.05, 0.3]),
        seed=seed,
    )


class Driver:
    """Plays a random serving loop on a group."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.group = Lockstep(random_shape(self.rng, seed))
        self.waiting: dict[str, Admit] = {}
        self.running: dict[str, Admit] = {}
        longest = self.group.shape.device_pages * self.group.shape.page_size // 3
        self.documents = [[self.rng.randrange(3) for _ in range(longest)] for _ in range(10)]
        self.ready: set[str] = set()
        self.sources: Counter[str] = Counter()
        self.states: Counter[str] = Counter()
        self.draining: Control | None = None
        self.next = 0

    def prompt(self) -> list[int]:
        """A document, mostly whole, sometimes cut, sometimes continued; few symbols, so that prompts share prefixes."""
        document = self.rng.choice(self.documents)
        if self.rng.random() < 0.3:
            document = document[: self.rng.randrange(1, len(document))]
        tail = [self.rng.randrange(3) for _ in range(self.rng.randrange(4))]
        return document + tail

    def arrivals(self) -> list[Admit]:
        admits = []
        if self.rng.random() < 0.5:
            again = self.rng.random() < 0.1 and self.waiting
            rid = self.rng.choice(list(self.waiting)) if again else f"r{self.next}"
            self.next += 1
            new = self.rng.randrange(5)
            admits.append(admit(rid, self.prompt(), self.rng.choice(NAMESPACES), new, self.rng.randrange(3)))
        return admits

    def endings(self) -> tuple[list[str], list[Finish]]:
        aborts, finishes = [], []
        for rid in list(self.running):
            if self.rng.random() < 0.3:
                request = self.running.pop(rid)
                if self.rng.random() < 0.2:
                    aborts.append(rid)
                    continue
                output = tokens_of(
                    [self.rng.randrange(3) for _ in range(self.rng.randrange(request.max_new_tokens + 1))]
                )
                finishes.append(Finish(rid, output, self.rng.random() < 0.9))
        for rid in list(self.waiting):
            if self.rng.random() < 0.05:
                del self.waiting[rid]
                aborts.append(rid)
        return aborts, finishes

    def requeued(self, aborts: list[str]) -> list[Admit]:
        """A running request is retracted and admitted again in the same step (D8)."""
        if not self.running or self.rng.random() > 0.05:
            return []
        rid = self.rng.choice(list(self.running))
        aborts.append(rid)
        return [self.running.pop(rid)]

    def chunks(self) -> list[Chunk]:
        """Running requests say how far their chunked prefill is."""
        running = [rid for rid in self.running if self.rng.random() < 0.1]
        return [Chunk(rid, self.rng.randrange(len(self.running[rid].tokens) // 4 + 1)) for rid in running]

    def controls(self) -> list[Control]:
        """Now and then a flush, a detach, an attach or another policy; a flush that has to drain is sent again."""
        if self.draining and self.rng.random() < 0.7:
            return [self.draining]
        if self.rng.random() > 0.04:
            return []
        return [
            self.rng.choice(
                [
                    Control("flush"),
                    Control("detach"),
                    *[Control("attach", {"backend": "faulty"})] * 4,
                    Control("policies", {"prefetch_policy": self.rng.choice(PREFETCH_POLICIES)}),
                    Control("policies", {"write_policy": self.rng.choice(WRITE_POLICIES)}),
                ]
            )
        ]

    def step(self) -> None:
        for moving in (*self.group.lanes, *self.group.workers):
            moving.advance(self.rng.randrange(4))
        self.group.clock.now += self.rng.random()
        aborts, finishes = self.endings()
        admits = [*self.arrivals(), *self.requeued(aborts)]
        polls = [rid for rid in self.waiting if self.rng.random() < 0.3]
        schedules = [rid for rid in self.waiting if self.rng.random() < (0.6 if rid in self.ready else 0.03)]
        self.waiting.update({a.rid: a for a in admits})
        controls, chunks = self.controls(), self.chunks()
        schedules = [rid for rid in schedules if rid not in aborts]
        polls = [rid for rid in polls if rid not in aborts]
        answer = self.group.step(
            aborts=aborts,
            finishes=finishes,
            admits=admits,
            polls=polls,
            schedules=schedules,
            controls=controls,
            chunks=chunks,
            peeks=[Peek(a.tokens, a.namespace) for a in admits],
        )
        self.states.update(state for state, _ in answer.controlled[0])
        self.draining = next(
            (c for c, (s, _) in zip(controls, answer.controlled[0], strict=True) if s == DRAINING), None
        )
        self.ready = {polled.rid for polled in answer.polled if polled.ready}
        for scheduled in answer.scheduled:
            if scheduled.ok:
                request = self.waiting.pop(scheduled.rid)
                self.running[scheduled.rid] = request
                self.sources.update(
                    device=scheduled.device_tokens, host=scheduled.host_tokens, storage=scheduled.storage_tokens
                )
                total = scheduled.device_tokens + scheduled.host_tokens + scheduled.storage_tokens
                assert total + scheduled.computed_tokens == len(request.tokens) // 4

    def end(self) -> None:
        """Ends everything: what is left is in the tree or free, and nothing is locked."""
        self.group.step(aborts=[*self.waiting, *self.running])
        self.group.settle()
        for cache in self.group.caches:
            ledger = cache.ledger()
            assert all(pool.in_flight == 0 for pool in ledger.values())
            assert cache.index.tree.protected_pages == 0 and cache.index.tree.protections == 0
            assert cache.prefetcher.occupied_pages == 0
        assert self.group.reductions == self.group.steps


def play(seed: int) -> Driver:
    driver = Driver(seed)
    for _ in range(SHORT if seed // 4 % LONG_EVERY else STEPS):
        driver.step()
    driver.end()
    return driver


@pytest.mark.parametrize("block", range(4))
def test_random_runs_balance_agree_and_return_right_bytes(block: int) -> None:
    """cases 24, 25, 49 to 52; D1 to D3, D7, D8: no lost slot, no wrong page, equal replicas, one reduction a step."""
    sources: Counter[str] = Counter()
    states: Counter[str] = Counter()
    for seed in range(block, SEQUENCES, 4):
        try:
            driver = play(seed)
            sources.update(driver.sources)
            states.update(driver.states)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    assert all(sources[tier] > 0 for tier in ("device", "host", "storage")), sources
    assert all(states[state] > 0 for state in (DONE, DRAINING, REFUSED)), states
