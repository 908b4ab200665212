"""`hicache-ray replay`: a workload through the cache, on Ray, in this process, or on the index alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hicache_ray.commands.input import (
    MOST_PROCESSES,
    BadInput,
    ByteSize,
    OutputPath,
    Whole,
    bad_input,
    check_output,
    config_options,
    given_options,
)
from hicache_ray.commands.running import INDEX, LOCAL, RAY, RunFailed, checked_config, run_replay, write_json
from hicache_ray.config.names import (
    ATTENTION_KINDS,
    IO_BACKENDS,
    MEM_LAYOUTS,
    PREFETCH_POLICIES,
    WRITE_POLICIES,
    eviction_policies,
)
from hicache_ray.replay.report import ReplayReport, report_tables, sweep_table
from hicache_ray.replay.settings import ReplaySettings
from hicache_ray.replay.sweep import check_plot, combinations, parse_sweeps, plot_sweep
from hicache_ray.replay.traces import BLOCK_TOKENS
from hicache_ray.replay.workload import Workload, load_workload
from hicache_ray.storage.registry import parse_storage_url

if TYPE_CHECKING:
    from rich.console import Console

Run = tuple[dict[str, "int | str"], ReplayReport]

OWN_NAMES = (
    *("tp_size", "page_size", "attention", "layers", "heads", "head_dim", "kv_lora_rank", "qk_rope_head_dim"),
    *("l1_tokens", "hicache_ratio", "hicache_size", "storage_actors", "storage_actor_size", "radix_eviction_policy"),
    *("hicache_write_policy", "hicache_storage_prefetch_policy", "hicache_mem_layout", "hicache_io_backend"),
    *("pp_size", "pp_rank", "dp_size", "enable_dp_attention"),
)
"""Options of HiCacheConfig that a replay has under a name of its own, or not at all."""

DEFAULTS = ReplaySettings()
COUNT = Whole(1)
PROCESSES = Whole(1, MOST_PROCESSES)


@click.command("replay")
@click.argument("source", metavar="TRACE")
@click.option("--tp", type=PROCESSES, default=DEFAULTS.tp, help="Tensor-parallel ranks of an instance.")
@click.option("--page-size", type=COUNT, default=DEFAULTS.page_size, help="Tokens a page.")
@click.option("--attention", type=click.Choice(ATTENTION_KINDS), default=DEFAULTS.attention, help="Kind of KV cache.")
@click.option("--layers", type=COUNT, default=DEFAULTS.layers, help="Layers of the KV cache.")
@click.option("--heads", type=COUNT, default=DEFAULTS.heads, help="KV heads (MHA).")
@click.option("--head-dim", type=COUNT, default=DEFAULTS.head_dim, help="Elements of a head, or of the latent (MLA).")
@click.option("--l1-tokens", type=COUNT, help="Capacity of L1 per rank; with --index-only on a block trace: in blocks.")
@click.option("--l2-tokens", type=Whole(0), help="Capacity of L2 per rank, as for L1. Default: 4 x L1.")
@click.option("--l3-bytes", type=ByteSize(), default=DEFAULTS.l3_bytes, help="Capacity of L3 (64MiB, 1GB); 0: none.")
@click.option("--l3", metavar="URL", help="L3 instead: file:///DIR, mooncake://HOST:PORT?metadata=URL, ray://POOL.")
@click.option("--storage-actors", type=PROCESSES, default=DEFAULTS.storage_actors, help="Storage actors that hold L3.")
@click.option("--policy", type=click.Choice(eviction_policies()), default=DEFAULTS.policy, help="Eviction policy.")
@click.option(
    "--write-policy", type=click.Choice(WRITE_POLICIES), default=DEFAULTS.write_policy, help="L1 to L2: when."
)
@click.option(
    "--prefetch-policy",
    type=click.Choice(PREFETCH_POLICIES),
    default=DEFAULTS.prefetch_policy,
    help="When a request stops waiting for L3.",
)
@click.option("--layout", type=click.Choice(MEM_LAYOUTS), default=DEFAULTS.layout, help="Order of bytes in L2.")
@click.option("--io-backend", type=click.Choice(IO_BACKENDS), help="L1 to L2: how. Default: what the layout needs.")
@click.option(
    "--instances", type=PROCESSES, default=DEFAULTS.instances, help="Groups that share L3, served round robin."
)
@click.option("--concurrency", type=COUNT, default=DEFAULTS.concurrency, help="Most requests of an instance in a step.")
@click.option("--limit", type=COUNT, help="Only the first so many requests.")
@click.option("--block-tokens", type=Whole(1, BLOCK_TOKENS), default=BLOCK_TOKENS, help="Scale trace blocks.")
@click.option("--index-only", is_flag=True, help="The index alone: no Ray, no bytes, one trace block is one page.")
@click.option("--local", is_flag=True, help="All ranks in this process, without Ray.")
@click.option("--seed", type=Whole(0), default=DEFAULTS.seed, help="Of everything that is made up.")
@click.option("--json", "json_path", type=OutputPath(), help="Write the report there (- is stdout).")
@click.option("--sweep", "sweeps", multiple=True, metavar="NAME=V1,V2", help="Run each value; may be given repeatedly.")
@click.option("--plot", "plot_path", type=OutputPath(), help="Draw the sweep there (.png, .svg, .pdf).")
@config_options(leave_out=OWN_NAMES)
def command(source: str, index_only: bool, local: bool, **options: Any) -> int:
    """Replay TRACE and report what each tier saved.

    TRACE is a Mooncake trace (one JSON object a line with input_length, output_length and hash_ids), a tau-bench
    result or an LMCache agent trace, plain, .gz or .xz; or a made-up chat:
    chat:sessions=50,turns=6,system=512,turn=64,answer=64

    Every cached page is compared with what it must hold before it is used. Exit code 1 when one was wrong or a pool did
    not balance, 2 for bad input.
    """
    from rich.console import Console

    console = Console(stderr=True)
    mode = _mode(index_only, local)
    runs, swept = _runs(source, mode, options, console)
    out = console if str(options["json_path"]) == "-" else Console()
    _show(out, runs, swept)
    write_json(options["json_path"], _document(runs, swept))
    if options["plot_path"] is not None:
        with bad_input():
            plot_sweep(options["plot_path"], runs, Path(source).name)
    faults = [fault for _, report in runs for fault in report.faults]
    if faults:
        raise RunFailed("; ".join(faults))
    return 0


def _runs(source: str, mode: str, options: Mapping[str, Any], console: Console) -> tuple[list[Run], list[str]]:
    """All runs of the command, everything that can be checked being checked before the first begins."""
    workload, settings, sweeps = _prepare(source, options)
    combined = list(combinations(settings, sweeps))
    configs = [checked_config(workload, chosen, mode) for _, chosen in combined]
    runs = []
    for number, ((values, chosen), config) in enumerate(zip(combined, configs, strict=True), start=1):
        if sweeps and console.is_terminal:
            console.print(f"run {number} of {len(combined)}: {_named(values)}")
        runs.append((values, run_replay(workload, chosen, config, mode, console)))
    return runs, list(sweeps)


def _prepare(source: str, options: Mapping[str, Any]) -> tuple[Workload, ReplaySettings, dict[str, list[int | str]]]:
    own = {entry.name: options[entry.name] for entry in fields(ReplaySettings) if entry.name != "others"}
    with bad_input():
        if options["json_path"] is not None and str(options["json_path"]) != "-":
            check_output(options["json_path"], "--json")
        if options["plot_path"] is not None:
            check_plot(options["plot_path"])
            check_output(options["plot_path"], "--plot")
        sweeps = parse_sweeps(options["sweeps"], _option_value)
        others = given_options({**options, **dict.fromkeys(OWN_NAMES)})
        settings = ReplaySettings(**own, others={**others, **_store(options["l3"])})
        workload = load_workload(
            source, limit=options["limit"], seed=options["seed"], block_tokens=options["block_tokens"]
        )
    return workload, settings, sweeps


def _option_value(name: str, text: str) -> int | str:
    """A swept value, read as the option of that name reads it; ValueError when it is none."""
    (option,) = (known for known in command.params if known.name == name)
    try:
        value: int | str = option.type.convert(text, option, None)
    except click.BadParameter as error:
        raise ValueError(error.message) from None
    return value


def _store(url: str | None) -> dict[str, Any]:
    """The options that a storage URL stands for."""
    if url is None:
        return {}
    target = parse_storage_url(url)
    return {
        "hicache_storage_backend": target.backend,
        "hicache_storage_backend_extra_config": target.extra or None,
    }


def _mode(index_only: bool, local: bool) -> str:
    if index_only and local:
        raise BadInput("--index-only and --local exclude each other: give one of them")
    return INDEX if index_only else LOCAL if local else RAY


def _show(console: Console, runs: Sequence[Run], swept: Sequence[str]) -> None:
    if swept:
        console.print(sweep_table(swept, runs))
        return
    for table in report_tables(runs[0][1]):
        console.print(table)


def _document(runs: Sequence[Run], swept: Sequence[str]) -> dict[str, Any]:
    if not swept:
        return runs[0][1].as_dict()
    return {"sweep": list(swept), "runs": [{"values": values, **report.as_dict()} for values, report in runs]}


def _named(values: Mapping[str, int | str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
