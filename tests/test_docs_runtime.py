"""docs/events.md and docs/runtime-control.md: their programs run, and their tables name what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hicache_ray.commands.ctl import ctl_command
from hicache_ray.config import HiCacheConfig
from hicache_ray.config.option import options_of
from hicache_ray.rank.control import POLICIES
from hicache_ray.rank.group import Group

DOCS = Path(__file__).resolve().parent.parent / "docs"
EVENTS, CONTROL = ((DOCS / name).read_text() for name in ("events.md", "runtime-control.md"))


@pytest.mark.parametrize("text", [EVENTS, CONTROL], ids=["events", "runtime-control"])
def test_the_programs_run(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    programs = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert programs
    for program in programs:
        exec(compile(program, "docs", "exec"), {"__name__": "docs"})


def test_the_events_page_names_the_options() -> None:
    named = re.findall(r"^\| `((?:enable_kv_events|kv_events_\w+))` \|", EVENTS, re.MULTILINE)
    assert set(named) == {name for name in options_of(HiCacheConfig) if "kv_events" in name}


def test_the_commands_page_names_commands_methods_and_policies() -> None:
    rows = [
        line.split("|")[1:3] for line in CONTROL.split("## What is refused")[0].splitlines() if line.startswith("|")
    ]
    methods = {match[1] for method, _ in rows if (match := re.match(r" `(\w+)\(", method))}
    others = {"step", "stats", "check_integrity", "stop", "name", "size", "generation"}
    assert methods == {name for name in vars(Group) if not name.startswith("_")} - others
    assert {re.sub(r"[` ].*", "", cli.strip().strip("`")) for _, cli in rows[2:]} == set(ctl_command.commands)
    assert dict(re.findall(r"^\| `(\w+)` \| `(\w+)` \|$", CONTROL, re.MULTILINE)) == dict(POLICIES)
