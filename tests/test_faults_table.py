"""docs/reliability.md: every kind of failure has its row, and every row's tests are there, named after it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

PAGE = REPOSITORY / "docs" / "reliability.md"

KINDS = [
    "ranks desynchronise and hang",
    "host or device slots leak",
    "double free, use after free",
    "memory grows outside the pools",
    "lost or unreachable L3 prefix",
    "wrong bytes under a right key; key too narrow",
    "keys differ between processes",
    "transfer races",
    "lookup says yes, read says no",
    "backend errors",
    "background thread or loop dies silently",
    "prefetch stuck, late, useless",
    "capacity edges",
    "directory or owner lost",
    "torn or orphaned files",
    "events drift from the truth",
    "slower than recomputing",
]
"""What was collected from public reports on caches of this kind."""


def rows() -> dict[str, list[str]]:
    """Kind -> what its row names, from the second table."""
    table = PAGE.read_text().partition("| kind | tests |")[2].partition("\n\n")[0]
    found = {}
    for line in table.splitlines()[2:]:
        kind, tests = (cell.strip() for cell in line.strip("|").split("|"))
        found[kind] = re.findall(r"`([^`]+)`", tests)
    return found


def functions(path: Path) -> list[str]:
    return [node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]


@pytest.mark.parametrize("kind", rows())
def test_each_row_names_tests_that_are_there(kind: str) -> None:
    named = rows()[kind]
    assert named
    for name in named:
        file, _, function = name.partition("::")
        assert (REPOSITORY / file).exists(), name
        assert not function or any(one.startswith(function) for one in functions(REPOSITORY / file)), name


@pytest.mark.parametrize("kind", rows())
def test_the_first_test_of_a_row_is_named_after_its_kind(kind: str) -> None:
    first = rows()[kind][0].partition("::test_")[2]
    words = re.sub(r"\W+", "_", kind.partition(";")[0].lower()).strip("_")
    assert first == words


def test_every_kind_that_was_collected_has_a_row() -> None:
    assert list(rows()) == KINDS


def test_the_measured_table_has_figures() -> None:
    table = PAGE.read_text().partition("| fault |")[2].partition("\n\n")[0].splitlines()[2:]
    assert len(table) >= 12
    for line in table:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert len(cells) == 4 and all(cells), line
