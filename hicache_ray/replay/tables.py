"""A replay's report as tables for people, and as one sentence a tier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hicache_ray.replay.report import STEP_PARTS, ReplayReport

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

PATH_NAMES = {"l1_to_l2": "L1 to L2", "l2_to_l1": "L2 to L1", "l2_to_l3": "L2 to L3", "l3_to_l2": "L3 to L2"}
EVICTION_NAMES = {"l1_evicted": "L1", "l2_evicted": "L2", "l1_dropped": "L1, dropped for want of room in L2"}


def report_tables(report: ReplayReport) -> list[RenderableType]:
    """The tables of a report, each only where there is something in it."""
    tables: list[RenderableType] = [_token_table(report)]
    if report.bytes:
        tables.append(_side_by_side(_bytes_table(report), _step_table(report)))
    tables.append(_pool_table(report))
    tables.append(_closing_lines(report))
    return tables


def sweep_table(swept: Sequence[str], rows: Sequence[tuple[Mapping[str, object], ReplayReport]]) -> Table:
    """One row a run of a sweep: the swept values, the hit rates, the tokens by tier."""
    table = _table("sweep", *swept)
    for title in ("block hits", "token hits", "L1", "L2", "L3", "seconds"):
        table.add_column(title, justify="right")
    for values, report in rows:
        tokens, counts = report.counts.tokens, report.counts
        tiers = (counts.tokens_l1, counts.tokens_l2, counts.tokens_l3)
        table.add_row(
            *(str(values[name]) for name in swept),
            f"{report.block_hit_rate:.4f}",
            f"{report.token_hit_rate:.4f}",
            *(_percent(part, tokens) for part in tiers),
            f"{report.seconds:.2f}",
        )
    return table


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
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("the last unit takes everything")


def _token_table(report: ReplayReport) -> Table:
    counts = report.counts
    name = Path(report.workload).name
    table = _table(f"{name}: {counts.requests:,} requests in {report.seconds:.2f} s", "prompt tokens")
    table.add_column("tokens", justify="right")
    table.add_column("share", justify="right")
    rows = {
        "found in L1": counts.tokens_l1,
        "found in L2": counts.tokens_l2,
        "found in L3": counts.tokens_l3,
        "computed": counts.tokens_computed,
    }
    for title, tokens in rows.items():
        table.add_row(title, f"{tokens:,}", _percent(tokens, counts.tokens))
    table.add_section()
    table.add_row("all", f"{counts.tokens:,}", "")
    found = counts.tokens - counts.tokens_computed
    table.add_row("token hit rate", f"{found:,}", f"{report.token_hit_rate:.4f}")
    table.add_row(
        f"block hit rate, of {counts.blocks:,} blocks", f"{counts.hit_blocks:,}", f"{report.block_hit_rate:.4f}"
    )
    return table


def _bytes_table(report: ReplayReport) -> Table:
    table = _table("moved", "path")
    table.add_column("bytes", justify="right")
    for path, count in report.bytes.items():
        table.add_row(PATH_NAMES.get(path, path), size(count))
    return table


def _step_table(report: ReplayReport) -> Table:
    table = _table("step time", "part")
    table.add_column("p50", justify="right")
    table.add_column("p99", justify="right")
    for part in STEP_PARTS:
        if part in report.step_us:
            times = report.step_us[part]
            table.add_row(part, f"{times['p50'] / 1000:.2f} ms", f"{times['p99'] / 1000:.2f} ms")
    return table


def _pool_table(report: ReplayReport) -> Table:
    table = _table("pools, in pages", "pool")
    for column in ("total", "free", "in tree", "in flight"):
        table.add_column(column, justify="right")
    for pool, ledger in report.ledger.items():
        if ledger["total"]:
            counts = (ledger[name] for name in ("total", "free", "in_tree", "in_flight"))
            table.add_row(pool.upper(), *(f"{count:,}" for count in counts))
    return table


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


def _table(title: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column)
    return table


def _side_by_side(*tables: Table) -> Table:
    from rich.table import Table

    grid = Table.grid(padding=(0, 4))
    for _ in tables:
        grid.add_column(vertical="top")
    grid.add_row(*tables)
    return grid


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"
