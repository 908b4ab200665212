"""Cost of the index per request beside its floor, and of an eviction against the number of leaves.

    python benchmarks/tree.py [--page 16] [--rounds 3] [--sessions 2000] [--leaves 1000,10000,100000]

The requests are multi-turn chat: one shared system prompt, 300 new tokens a turn. Per request: look up, lock, load
back, make room, insert, unlock; the copies themselves are no part of it. The floor touches every token of the prompt
once, against memory that is cold in the cache, and copies what is new: it caches nothing. CPU time; floor and index
take turns, and `of floor` is the median over the rounds. A floor in C called through ctypes, as the side-by-side suite
has it, costs almost twice as much, most of it in the calls.
"""

from __future__ import annotations

import sys
from pathlib import Path

# This folder comes first on the path of a script, where its file names would hide modules of the standard library.
FOLDER = Path(__file__).resolve().parent
sys.path[:] = [str(FOLDER.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != FOLDER)]

import argparse  # noqa: E402
import gc  # noqa: E402
import statistics  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from typing import NamedTuple  # noqa: E402

import numpy as np  # noqa: E402

from benchmarks.peer_trees import Replay  # noqa: E402

SYSTEM, TURN, ASKED, MAX_TURNS, ACTIVE = 2000, 300, 100, 20, 256
COLD_TOKENS = 1 << 25
"""Tokens of cold memory: 128 MB, more than a processor's cache."""
TIERS = {"one tier": (1_000_000, 0.0), "two tiers": (400_000, 2.5)}
"""L1 in tokens, and L2 as a multiple of it."""
LEAF, PREFIX = 64, 256


class ChatRequest(NamedTuple):
    """A prompt and the whole sequence it is a prefix of, int32."""

    prompt: np.ndarray
    full: np.ndarray


def chat(sessions: int, seed: int = 0) -> Iterator[ChatRequest]:
    """Turns of many conversations, interleaved; the same for the same arguments."""
    rng = np.random.default_rng(seed)
    turns = rng.integers(1, MAX_TURNS + 1, sessions)
    system = rng.integers(0, 1 << 17, SYSTEM, dtype=np.int32)
    live: list[tuple[np.ndarray, int]] = []
    began = 0
    while live or began < sessions:
        while len(live) < ACTIVE and began < sessions:
            body = rng.integers(0, 1 << 17, int(turns[began]) * TURN, dtype=np.int32)
            live.append((np.concatenate([system, body]), 0))
            began += 1
        at = int(rng.integers(len(live)))
        tokens, turn = live[at]
        base = SYSTEM + turn * TURN
        yield ChatRequest(tokens[: base + ASKED], tokens[: base + TURN])
        live[at] = (tokens, turn + 1)
        if base + TURN == len(tokens):
            live[at] = live[-1]
            live.pop()


class Floor:
    """The least a prefix cache has to do: read the prompt against stored tokens, and store what is new."""

    def __init__(self) -> None:
        self.cold = np.ones(COLD_TOKENS, dtype=np.int32)
        self.differs = np.empty(1 << 16, dtype=bool)
        self.stored = np.empty(1 << 16, dtype=np.int32)
        self.at = 0

    def serve(self, request: ChatRequest) -> None:
        prompt, new = len(request.prompt), max(3 * (len(request.full) - len(request.prompt)), 512)
        self.at = (self.at + 3_000_017) % (COLD_TOKENS - (1 << 20))
        differs = self.differs[:prompt]
        np.not_equal(request.prompt, self.cold[self.at : self.at + prompt], out=differs)
        np.count_nonzero(differs)
        self.stored[:new] = self.cold[self.at : self.at + new]


def timed(requests: Iterator[ChatRequest], serve: Callable[[ChatRequest], int]) -> float:
    """CPU microseconds per request, of what `serve` reports in nanoseconds."""
    gc.collect()
    spent = [serve(request) for request in requests]
    return sum(spent) / len(spent) / 1e3


def floor_round(sessions: int) -> float:
    """Microseconds per request of the floor."""
    floor = Floor()

    def serve(request: ChatRequest) -> int:
        start = time.process_time_ns()
        floor.serve(request)
        return time.process_time_ns() - start

    return timed(chat(sessions), serve)


def index_round(sessions: int, page: int, capacity: int, ratio: float) -> float:
    """Microseconds per request of the index. The token containers are made off the clock."""
    replay = Replay(ratio, page, capacity)

    def serve(request: ChatRequest) -> int:
        full = replay.prep(request.full)
        prompt = full[: len(request.prompt)]
        start = time.process_time_ns()
        handle = replay.match(prompt)
        replay.insert(handle, full, replay.alloc(handle, prompt, full))
        return time.process_time_ns() - start

    spent = timed(chat(sessions), serve)
    replay.close()
    return spent


def report_requests(page: int, rounds: int, sessions: int) -> None:
    """Prints the cost per request of each arrangement of tiers, beside the floor of the same round."""
    print(f"chat, page {page}: CPU us per request")
    for name, (capacity, ratio) in TIERS.items():
        floors = [floor_round(sessions)]
        costs = []
        for _ in range(rounds):
            costs.append(index_round(sessions, page, capacity, ratio))
            floors.append(floor_round(sessions))
        # A round's floor is the mean of the one before and the one after it.
        around = [(before + after) / 2 for before, after in zip(floors, floors[1:], strict=False)]
        ratios = statistics.median(cost / floor for cost, floor in zip(costs, around, strict=True))
        cost, floor = statistics.median(costs), statistics.median(floors)
        print(f"  {name:<10} {cost:7.1f}   floor {floor:5.1f}   {ratios:5.2f} of floor")


def leaf_tokens(number: int, prefix: np.ndarray) -> np.ndarray:
    """The shared prefix and `LEAF` tokens that only this leaf has."""
    own = (np.arange(LEAF, dtype=np.int64) * 2_654_435_761 + number * 40_503 + number) & 0x7FFFFFFF
    return np.concatenate([prefix, own.astype(np.int32)])


def evict_cost(leaves: int, page: int, tries: int = 7, nodes: int = 64) -> float:
    """Microseconds per evicted node in a tree of so many leaves under one prefix."""
    replay = Replay(0, page, (leaves + 2 * nodes) * LEAF + 4096)
    prefix = np.arange(PREFIX, dtype=np.int32)

    def add(number: int) -> None:
        full = replay.prep(leaf_tokens(number, prefix))
        handle = replay.match(full)
        replay.insert(handle, full, replay.alloc(handle, full, full))

    for number in range(leaves):
        add(number)
    spent = []
    for attempt in range(tries):
        start = time.process_time_ns()
        replay.evict(nodes * LEAF)
        spent.append((time.process_time_ns() - start) / nodes / 1e3)
        for number in range(nodes):
            add(leaves + attempt * nodes + number)
    return statistics.median(spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sessions", type=int, default=2000)
    parser.add_argument("--leaves", default="1000,10000,100000", help="tree sizes, comma separated; empty: none")
    options = parser.parse_args()
    report_requests(options.page, options.rounds, options.sessions)
    for leaves in (int(text) for text in options.leaves.split(",") if text):
        print(f"evict from {leaves:>9,} leaves: {evict_cost(leaves, options.page):5.2f} CPU us per node")


if __name__ == "__main__":
    main()
