"""Speed of the page hash chain beside its floor: one SHA-256 over as many 64-byte blocks, in the same rounds.

    python benchmarks/hash.py [--tokens 32768] [--rounds 40] [--pages 1,16,64,128]

CPU time, median over interleaved rounds. `of floor` is the floor's time over ours, taken round by round.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import time
from collections.abc import Callable

import numpy as np

from hicache_ray.hashing import HASH_BYTES, TOKEN_BYTES, bigram_units, page_hashes, token_bytes

SHA_BLOCK, SHA_PADDING = 64, 9


def blocks_of(page_bytes: int) -> int:
    """64-byte blocks that SHA-256 works through for one page, its prior hash and padding included."""
    return -(-(page_bytes + HASH_BYTES + SHA_PADDING) // SHA_BLOCK)


def measure(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[int]]:
    """CPU nanoseconds of each call in each round, the calls taking turns."""
    samples: dict[str, list[int]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.process_time_ns()
            call()
            samples[name].append(time.process_time_ns() - start)
    return samples


def report(page_size: int, n_tokens: int, rounds: int) -> None:
    tokens = np.random.default_rng(7).integers(0, 151_936, n_tokens, dtype=np.int64)
    units, as_list = token_bytes(tokens), tokens.tolist()
    pages = n_tokens // page_size
    stream = bytes(blocks_of(page_size * TOKEN_BYTES) * SHA_BLOCK * pages - SHA_PADDING)
    calls: dict[str, Callable[[], object]] = {
        "floor": lambda: hashlib.sha256(stream).digest(),
        "units (bytes)": lambda: page_hashes(units, page_size),
        "int64 array": lambda: page_hashes(tokens, page_size),
        "list": lambda: page_hashes(as_list, page_size),
        "bigram array": lambda: page_hashes(bigram_units(tokens), page_size, bigram=True),
    }
    samples = measure(calls, rounds)
    for name, times in samples.items():
        ratio = statistics.median(floor / own for floor, own in zip(samples["floor"], times, strict=True))
        median = statistics.median(times)
        rate = n_tokens / median * 1e3
        speed = f"{median / pages:>9.0f} ns/page  {rate:>8.1f} M tokens/s"
        print(f"{page_size:>5}  {name:<14} {speed}  {ratio:>6.3f} of floor")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--pages", default="1,16,64,128", help="page sizes, comma separated")
    options = parser.parse_args()
    for page_size in (int(text) for text in options.pages.split(",")):
        report(page_size, options.tokens, options.rounds)


if __name__ == "__main__":
    main()
