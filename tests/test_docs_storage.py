"""docs/storage.md: its programs run, in order, and its tables name the options that there are."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from hicache_ray.storage.file.options import FileOptions
from hicache_ray.storage.mooncake import options as mooncake_options
from hicache_ray.storage.pool.options import RayPoolOptions

TEXT = (Path(__file__).resolve().parent.parent / "docs" / "storage.md").read_text()


def table_options(heading: str) -> list[list[str]]:
    """Cells of the option table below a heading, names without their backticks."""
    section = TEXT.split(f"### `{heading}`")[1].split("\n### ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in row] for row in rows]


def names(heading: str) -> list[str]:
    return [row[0].strip("`") for row in table_options(heading)]


def test_the_programs_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    programs = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(programs) >= 7
    scope: dict[str, object] = {"__name__": "docs_storage"}
    for program in programs:
        exec(compile(program, "docs/storage.md", "exec"), scope)


def test_tables_name_all_options() -> None:
    assert names("file") == list(FileOptions._fields)
    assert names("ray") == [field.name for field in dataclasses.fields(RayPoolOptions)]
    assert names("mooncake") == list(mooncake_options.OPTIONS)


def test_mooncake_variables_and_defaults() -> None:
    for name, variables, default, _ in table_options("mooncake"):
        source = mooncake_options.OPTIONS[name.strip("`")]
        assert re.findall(r"`(\w+)`", variables) == list(source.variables)
        said = {"false": False}.get(default, default)
        assert str(source.default) == str(said)
