"""The examples of docs/fault-injection.md run, and say what they should (the third: tests/test_faults_plugin.py)."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY

EXPECTED = {
    "faults_rank": ["was rebuilt as generation", "kill of rank 1 of instance-0 at rank.reduce", "cached"],
    "faults_store": ["corrupt", "generation 0: the group was not rebuilt", "in the store afterwards: []"],
}


@pytest.mark.ray
@pytest.mark.parametrize("name", EXPECTED)
def test_example(name: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "examples" / f"{name}.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for text in EXPECTED[name]:
        assert text in done.stdout, done.stdout
