"""docs/cases.md and docs/design.md: what they name exists, and whatever code and tests cite stands there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

CASES, DESIGN = (REPOSITORY / "docs" / name for name in ("cases.md", "design.md"))

_LIST = r"(\d+(?:(?:, and |, | and | to |-)\d+)*)"
_CASE = re.compile(rf"(?<![a-z])cases?[ _]{_LIST}", re.IGNORECASE)
_DEFECT = re.compile(r"\bD(\d+)(?: to D(\d+))?\b")
_SECTION = re.compile(rf"docs/design\.md {_LIST}")


def numbers(text: str) -> set[int]:
    """The numbers of "1, 2 and 5 to 7"."""
    found: set[int] = set()
    for part in re.split(r", and |, | and ", text):
        ends = [int(end) for end in re.split(r" to |-", part)]
        found.update(range(ends[0], ends[-1] + 1))
    return found


def cited(text: str) -> set[str]:
    """Cases ("54"), defects ("D5") and design sections ("section 6") that a text names."""
    found = {str(number) for match in _CASE.finditer(text) for number in numbers(match.group(1))}
    for match in _DEFECT.finditer(text):
        first, last = int(match.group(1)), int(match.group(2) or match.group(1))
        found.update(f"D{number}" for number in range(first, last + 1))
    found.update(f"section {number}" for match in _SECTION.finditer(text) for number in numbers(match.group(1)))
    return found


def entries() -> dict[str, str]:
    """Case or defect -> its text."""
    parts = re.split(r"^### (?:Case )?(D?\d+): .*$", CASES.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def named_tests(text: str) -> list[str]:
    return re.findall(r"`([\w/]+\.py::test_\w+)`", text)


def functions(path: Path) -> list[str]:
    return [node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]


def exists(name: str) -> bool:
    """Whether a file has a test whose name begins as given."""
    file, _, beginning = name.partition("::")
    path = REPOSITORY / file
    return path.exists() and any(function.startswith(beginning) for function in functions(path))


def test_every_case_and_defect_has_its_entry() -> None:
    assert list(entries()) == [*map(str, range(1, 66)), *(f"D{number}" for number in range(1, 13))]


@pytest.mark.parametrize("entry", entries())
def test_an_entry_names_tests_that_exist(entry: str) -> None:
    named = named_tests(entries()[entry])
    assert named
    assert [name for name in named if not exists(name)] == []


def test_the_design_has_nine_sections_and_a_test_for_each_promise() -> None:
    text = DESIGN.read_text()
    assert re.findall(r"^## (\d+)\. ", text, re.MULTILINE) == [str(number) for number in range(1, 10)]
    promises = re.findall(r"^\| (\d)\. .*\| (.*) \|$", text, re.MULTILINE)
    assert [number for number, _ in promises] == list("12345678")
    for _, cell in promises:
        names = re.findall(r"`([^`]+)`", cell)
        assert names and all(exists(name) if "::" in name else (REPOSITORY / name).exists() for name in names), cell


def test_whatever_is_cited_is_there() -> None:
    known = {*entries(), *(f"section {number}" for number in range(1, 10))}
    unknown = []
    for folder in ("hicache_ray", "tests", "benchmarks", "examples", "docs"):
        for path in sorted((REPOSITORY / folder).rglob("*")):
            if path.suffix in {".py", ".md"} and path != Path(__file__).resolve():
                unknown += [f"{path.name}: {name}" for name in sorted(cited(path.read_text()) - known)]
    assert unknown == []


def test_nothing_is_cited_that_is_not_in_the_repository() -> None:
    outside = re.compile(r"\b(DESIGN \d|FAILURES|(CASES|RAY|GPU|HOUSE)\.md)\b|\barticle'?s? \d|\bruling\b")
    found = []
    for folder in ("hicache_ray", "tests", "benchmarks", "examples", "docs"):
        for path in sorted((REPOSITORY / folder).rglob("*")):
            if path.suffix in {".py", ".md"} and path != Path(__file__).resolve() and outside.search(path.read_text()):
                found.append(str(path.relative_to(REPOSITORY)))
    assert found == []


def test_citations_are_read_as_they_are_written() -> None:
    assert cited("Case 22. and cases 39, 40 and 51; CASES 24 to 26, D1 to D3, D8, docs/design.md 6 and 7.") == {
        *("22", "39", "40", "51", "24", "25", "26"),
        *("D1", "D2", "D3", "D8"),
        *("section 6", "section 7"),
    }
    assert cited("test_case_60_mha ") == {"60"}
