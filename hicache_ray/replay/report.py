"""What a replay found, under names that stay: the JSON of `hicache-ray replay --json` is `ReplayReport.as_dict()`.

Every number was measured during the run. A number that a mode does not have (bytes, without memory) is empty, not zero.
Below the report: the same as tables for people, and as one sentence a tier.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


OnProgress = Callable[[int], None]
"""Told the number of requests served so far."""

POOL_NAMES = {"device": "l1", "host": "l2"}
"""Names of the ranks' pools in reports."""

STEP_PARTS = ("total", "message", "reduction", "work", "engine")
"""Parts of a step's time: `total` is what the caller waited for the step."""


@dataclass
class TokenCounts:
    """Where the prompts' tokens came from, summed over requests as they are scheduled.

    Attributes:
        requests: prompts served.
        blocks: pages (index only: trace blocks) their tokens lie in, a part of one counted as one.
        hit_blocks: of those, found in any tier.
        tokens: prompt tokens; the four below add up to it.
        tokens_l1, tokens_l2, tokens_l3: found in that tier, and really used.
        tokens_computed: found nowhere.
    """

    requests: int = 0
    blocks: int = 0
    hit_blocks: int = 0
    tokens: int = 0
    tokens_l1: int = 0
    tokens_l2: int = 0
    tokens_l3: int = 0
    tokens_computed: int = 0

    @property
    def by_tier(self) -> tuple[int, int, int]:
        """Tokens found in L1, in L2 and in L3."""
        return self.tokens_l1, self.tokens_l2, self.tokens_l3

    def add(self, l1: int, l2: int, l3: int, computed: int, *, block_tokens: int, hit_blocks: int) -> None:
        """Counts one prompt by where its tokens came from."""
        tokens = l1 + l2 + l3 + computed
        self.requests += 1
        self.blocks += -(-tokens // block_tokens)
        self.hit_blocks += hit_blocks
        self.tokens += tokens
        self.tokens_l1 += l1
        self.tokens_l2 += l2
        self.tokens_l3 += l3
        self.tokens_computed += computed


class StepTimes:
    """Step times in microseconds, by part, of every step of a run."""

    def __init__(self) -> None:
        self._samples: dict[str, array[float]] = {}

    def add(self, timings_us: Mapping[str, float]) -> None:
        """Notes one step's parts; what it does not name is left out of that part's percentiles."""
        for part in STEP_PARTS:
            if part in timings_us:
                self._samples.setdefault(part, array("f")).append(timings_us[part])

    def percentiles(self) -> dict[str, dict[str, float]]:
        """p50 and p99 of each part that was measured."""
        return {
            part: {f"p{share}": round(float(np.percentile(samples, share)), 1) for share in (50, 99)}
            for part, samples in self._samples.items()
        }


@dataclass(frozen=True)
class ReplayReport:
    """The outcome of one replay.

    Attributes:
        workload: what was replayed.
        mode: "index", "local" or "ray".
        settings: the options of the run by name.
        counts: tokens by source.
        seconds: wall time of the replay without start and stop.
        pages_verified, pages_mismatched: cached pages compared in every layer before use, and those that held anything
            else than they must; summed over ranks.
        bytes: bytes moved by path ("l1_to_l2", ...), summed over ranks.
        step_us: p50 and p99 of a step by part.
        ledger: pages of each pool, summed over ranks.
        unbalanced: a sentence for each rank and pool whose ledger did not add up.
        digest_checks: steps in which the tree digests of several ranks were compared, and found equal.
        restarts: times that a group was rebuilt; its requests in flight were sent again and count again.
        evictions: pages evicted or dropped, by kind, of one rank of each instance.
        storage: counters of the L3 backends, summed over ranks.
    """

    workload: str
    mode: str
    settings: dict[str, Any]
    counts: TokenCounts
    seconds: float
    pages_verified: int = 0
    pages_mismatched: int = 0
    bytes: dict[str, int] = field(default_factory=dict)
    step_us: dict[str, dict[str, float]] = field(default_factory=dict)
    ledger: dict[str, dict[str, int]] = field(default_factory=dict)
    unbalanced: tuple[str, ...] = ()
    digest_checks: int = 0
    restarts: int = 0
    evictions: dict[str, int] = field(default_factory=dict)
    storage: dict[str, float] = field(default_factory=dict)

    @property
    def block_hit_rate(self) -> float:
        """Hit blocks of all blocks, 0 to 1."""
        return _ratio(self.counts.hit_blocks, self.counts.blocks)

    @property
    def token_hit_rate(self) -> float:
        """Prompt tokens that were not computed, 0 to 1."""
        return _ratio(self.counts.tokens - self.counts.tokens_computed, self.counts.tokens)

    @property
    def faults(self) -> tuple[str, ...]:
        """A sentence for each thing that must never be: a wrong page, a pool that does not balance."""
        wrong = self.pages_mismatched
        mismatches = (f"{wrong} cached pages held other bytes than they must",) if wrong else ()
        return mismatches + self.unbalanced

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "workload": self.workload,
            "mode": self.mode,
            "settings": self.settings,
            "seconds": round(self.seconds, 3),
            **asdict(self.counts),
            "block_hit_rate": round(self.block_hit_rate, 6),
            "token_hit_rate": round(self.token_hit_rate, 6),
            "pages_verified": self.pages_verified,
            "pages_mismatched": self.pages_mismatched,
            "bytes": self.bytes,
            "step_us": self.step_us,
            "ledger": self.ledger,
            "digest_checks": self.digest_checks,
            "restarts": self.restarts,
            "evictions": self.evictions,
            "storage": self.storage,
            "ledger_balanced": not self.unbalanced,
        }


def add_up(parts: Iterable[Mapping[str, float]]) -> dict[str, Any]:
    """Sums of counters by name, in the order of first appearance."""
    total: dict[str, Any] = {}
    for part in parts:
        for name, count in part.items():
            total[name] = total.get(name, 0) + count
    return total


def evictions_of(stats: Mapping[str, int]) -> dict[str, int]:
    """The eviction counters among an index's counters, in pages by kind."""
    return {
        "l1_evicted": stats["evicted_device_pages"],
        "l2_evicted": stats["evicted_host_pages"],
        "l1_dropped": stats["dropped_pages"],
    }


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


PATH_NAMES = {"l1_to_l2": "L1 to L2", "l2_to_l1": "L2 to L1", "l2_to_l3": "L2 to L3", "l3_to_l2": "L3 to L2"}
EVICTION_NAMES = {"l1_evicted": "L1", "l2_evicted": "L2", "l1_dropped": "L1, dropped for want of room in L2"}


def report_tables(report: ReplayReport) -> list[RenderableType]:
    """The tables of a report, each only where there is something in it."""
    from rich.table import Table

    tables: list[RenderableType] = [_token_table(report)]
    if report.bytes:
        beside = Table.grid(padding=(0, 4))
        beside.add_row(_bytes_table(report), _step_table(report))
        tables.append(beside)
    return [*tables, _pool_table(report), _closing_lines(report)]


def sweep_table(swept: Sequence[str], rows: Sequence[tuple[Mapping[str, object], ReplayReport]]) -> Table:
    """One row a run of a sweep: the swept values, the hit rates, the tokens by tier."""
    return _table(
        "sweep",
        swept,
        ("block hits", "token hits", "L1", "L2", "L3", "seconds"),
        [
            (
                *(str(values[name]) for name in swept),
                f"{report.block_hit_rate:.4f}",
                f"{report.token_hit_rate:.4f}",
                *(_percent(part, report.counts.tokens) for part in report.counts.by_tier),
                f"{report.seconds:.2f}",
            )
            for values, report in rows
        ],
    )


def tier_sentences(report: ReplayReport) -> list[str]:
    """One plain sentence for each tier: what it saved in this run."""
    counts, loaded = report.counts, report.bytes.get("l2_to_l1", 0)

    def part(tokens: int) -> str:
        return f"{tokens:,} of {counts.tokens:,} prompt tokens ({_percent(tokens, counts.tokens)})"

    return [
        f"L1, device memory, had {part(counts.tokens_l1)} in place: nothing moved, nothing was computed.",
        f"L2, host memory, saved computing {part(counts.tokens_l2)} that L1 had no room for any more.",
        f"L3, the storage actors, saved computing {part(counts.tokens_l3)} that had left L1 and L2, or that another "
        f"instance had computed; {size(loaded)} came back to L1 from L2 and L3.",
    ]


def size(count: float) -> str:
    """A number of bytes in the unit that suits it."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"


def _token_table(report: ReplayReport) -> Table:
    counts = report.counts
    sources = ("found in L1", "found in L2", "found in L3", "computed")
    rows = [
        (title, f"{tokens:,}", _percent(tokens, counts.tokens))
        for title, tokens in zip(sources, (*counts.by_tier, counts.tokens_computed), strict=True)
    ]
    title = f"{Path(report.workload).name}: {counts.requests:,} requests in {report.seconds:.2f} s"
    table = _table(title, ("prompt tokens",), ("tokens", "share"), rows)
    table.add_section()
    found = counts.tokens - counts.tokens_computed
    table.add_row("all", f"{counts.tokens:,}", "")
    table.add_row("token hit rate", f"{found:,}", f"{report.token_hit_rate:.4f}")
    blocks = f"block hit rate, of {counts.blocks:,} blocks"
    table.add_row(blocks, f"{counts.hit_blocks:,}", f"{report.block_hit_rate:.4f}")
    return table


def _bytes_table(report: ReplayReport) -> Table:
    rows = [(PATH_NAMES.get(path, path), size(count)) for path, count in report.bytes.items()]
    return _table("moved", ("path",), ("bytes",), rows)


def _step_table(report: ReplayReport) -> Table:
    rows = [
        (part, *(f"{report.step_us[part][share] / 1000:.2f} ms" for share in ("p50", "p99")))
        for part in STEP_PARTS
        if part in report.step_us
    ]
    return _table("step time", ("part",), ("p50", "p99"), rows)


def _pool_table(report: ReplayReport) -> Table:
    columns = ("total", "free", "in tree", "in flight")
    rows = [
        (pool.upper(), *(f"{ledger[column.replace(' ', '_')]:,}" for column in columns))
        for pool, ledger in report.ledger.items()
        if ledger["total"]
    ]
    return _table("pools, in pages", ("pool",), columns, rows)


def _closing_lines(report: ReplayReport) -> str:
    evicted = [f"{count:,} from {EVICTION_NAMES.get(kind, kind)}" for kind, count in report.evictions.items() if count]
    lines = [f"pages evicted: {', '.join(evicted) or 'none'}"]
    if report.mode != "index":
        lines.append(f"cached pages compared before use: {report.pages_verified:,}, wrong: {report.pages_mismatched:,}")
    if report.digest_checks:
        lines.append(f"steps in which the ranks' trees were compared and equal: {report.digest_checks:,}")
    if report.restarts:
        lines.append(f"groups rebuilt after a failure: {report.restarts}")
    balance = "; ".join(report.unbalanced) if report.unbalanced else "balanced: free + in tree = total in every pool"
    return "\n".join([*lines, f"ledger {balance}"])


def _table(title: str, names: Sequence[str], numbers: Sequence[str], rows: Sequence[tuple[str, ...]]) -> Table:
    """A table of rows; the columns of `numbers`, which come last, are aligned right."""
    from rich import box
    from rich.table import Table

    table = Table(*names, title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for column in numbers:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"
