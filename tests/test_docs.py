"""Every page: the files, modules and pages it names exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

PAGES = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").glob("*.md"), *REPOSITORY.glob("tests/data/*.md")])
CURRENT = [page for page in PAGES if page.name != "CHANGELOG.md"]
"""Pages about what is there; a changelog also names what is not any more."""

_FILE = re.compile(r"(?<![\w/.])(?:hicache_ray|tests|benchmarks|examples|docs|tools)/[\w*./-]*")
_MODULE = re.compile(r"(?<![\w.])(?:hicache_ray|examples)(?:\.\w+)+")
_LINK = re.compile(r"\]\((?!https?:)([^)#]*)(#[^)]*)?\)")


def named(pattern: re.Pattern[str]) -> Iterator[tuple[Path, str]]:
    for page in CURRENT:
        for match in pattern.finditer(page.read_text()):
            yield page, match.group(0)


def is_module_or_member(name: str) -> bool:
    """Whether a dotted name is a module, or something that the last module on its way defines or imports."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        path = REPOSITORY.joinpath(*parts[:end])
        source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if source.exists():
            return end == len(parts) or parts[end] in names_in(source)
        if path.is_dir():
            return end == len(parts)
    return False


def names_in(source: Path) -> set[str]:
    """What a module defines at its top, or imports, also for type checkers alone."""
    tree = ast.parse(source.read_text())
    found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found.update(alias.asname or alias.name for alias in node.names)
    return found


def defined_in(source: Path) -> set[str]:
    """Functions "f" and methods "Class.method" of a file, and its classes."""
    found = set()
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found.update(f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef))
    return found


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_file_that_a_page_names_exists() -> None:
    missing = []
    for page, name in named(_FILE):
        path = name.rstrip("./")
        if not (list(REPOSITORY.glob(path)) or list(REPOSITORY.glob(f"{path}*"))):
            missing.append(f"{page.name}: {name}")
    assert missing == []


def test_every_module_that_a_page_names_exists() -> None:
    missing = [f"{page.name}: {name}" for page, name in named(_MODULE) if not is_module_or_member(name)]
    assert missing == []


def test_the_tree_of_files_names_every_folder_and_no_file_that_is_gone() -> None:
    """Rows "| `hicache_ray/folder/` | ... `file.py` ... |"."""
    tree = (
        (REPOSITORY / "docs" / "architecture.md").read_text().partition("## The tree of files")[2].partition("## ")[0]
    )
    rows = re.findall(r"^\| (.*?) \| (.*) \|$", tree, re.MULTILINE)
    listed = [re.findall(r"`([^`]+)`", paths) for paths, _ in rows]
    for paths, (_, text) in zip(listed, rows, strict=True):
        for file in re.findall(r"`(\w+\.py)`", text):
            assert any((REPOSITORY / path / file).exists() for path in paths), f"{paths}: {file}"
    package = [path for path in (REPOSITORY / "hicache_ray").rglob("*/") if (path / "__init__.py").exists()]
    folders = {f"{path.relative_to(REPOSITORY)}/" for path in package}
    files = {str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "hicache_ray").glob("[!_]*.py")}
    assert (folders | files) - {path for paths in listed for path in paths} == set()


def test_every_function_beside_its_file_is_there() -> None:
    """Table rows "| `Class.method` | `hicache_ray/file.py` |"."""
    text = (REPOSITORY / "docs" / "architecture.md").read_text()
    rows = re.findall(r"\| `([\w.]+)` \| `(hicache_ray/[\w/]+\.py)` \|", text)
    missing = [f"{name} in {file}" for name, file in rows if name not in defined_in(REPOSITORY / file)]
    assert rows and missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in _LINK.findall(page.read_text()):
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{page.name}: {target}"
        assert not anchor or anchor[1:] in anchors(path), f"{page.name}: {target}{anchor}"


def test_the_readme_leads_to_every_page() -> None:
    linked = {target for target, _ in _LINK.findall((REPOSITORY / "README.md").read_text())}
    assert {f"docs/{page.name}" for page in (REPOSITORY / "docs").glob("*.md")} <= linked
