"""Which test holds which case: read from the tests' names and docstrings.

Read are "Case 22.", "cases 39 and 40", "CASES 24 to 26", "D5", and the ids of parametrized tests ("case_60_mha").
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).resolve().parent
CASES = [str(number) for number in range(1, 66)]
DEFECTS = [f"D{number}" for number in range(1, 13)]
_LIST = r"(\d+(?:(?:, | and |, and | to |-)\d+)*)"
_MENTION = re.compile(rf"[Cc](?:ase|ASE|ases|ASES)[ _]{_LIST}")
_DEFECT = re.compile(r"\bD(\d+)(?: to D(\d+))?\b")


def mentioned(text: str) -> set[str]:
    """The case numbers and defect ids a text names."""
    found = set()
    for match in _MENTION.finditer(text):
        numbers = re.split(r", and |, | and ", match.group(1))
        for part in numbers:
            ends = [int(end) for end in re.split(r" to |-", part)]
            found.update(str(number) for number in range(ends[0], ends[-1] + 1))
    for match in _DEFECT.finditer(text):
        first, last = int(match.group(1)), int(match.group(2) or match.group(1))
        found.update(f"D{number}" for number in range(first, last + 1))
    return found


def table() -> dict[str, list[str]]:
    """Test ids by case."""
    holders: dict[str, list[str]] = defaultdict(list)
    for path in sorted(TESTS.glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                text = f"{node.name} {ast.get_docstring(node) or ''}".replace("case_", "case ")
                for case in mentioned(text):
                    holders[case].append(f"{path.name}::{node.name}")
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("case_"):
                for case in mentioned(node.value):
                    holders[case].append(f"{path.name}::[{node.value}]")
    return holders


def main() -> None:
    """Prints the table, one case a line."""
    holders = table()
    for case in (*CASES, *DEFECTS):
        print(f"{case:>4}  {', '.join(holders.get(case, ['-- none --']))}")


if __name__ == "__main__":
    main()
