"""What `hicache-ray ctl` refuses before it looks for a service: no Ray runs here, and none is started."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from hicache_ray.cli import run


@pytest.fixture(autouse=True)
def nothing_is_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*arguments: object, **named: object) -> None:
        raise AssertionError("connected to Ray before the input was checked")

    monkeypatch.setattr("hicache_ray.service.connect", connect)
    monkeypatch.setattr(ray, "init", connect)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("{", "no JSON"),
        ("[1]", "holds a list"),
        ("@none.json", "'none.json' can't be read"),
        ("@options.ini", "must end in .json"),
        ('{"prefetch_threshold": "many"}', "prefetch_threshold is 'many'"),
    ],
)
def test_bad_options_of_an_attach_are_bad_input(
    options: str, text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["ctl", "attach", "file", "--options", options]) == 2
    err = capsys.readouterr().err
    assert text in err and "--options" in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("by_environment", [False, True])
def test_ctl_starts_no_ray_of_its_own(
    by_environment: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["ctl", "status"] if by_environment else ["ctl", "--address", "local", "status"]
    if by_environment:
        monkeypatch.setenv("RAY_ADDRESS", "local")
    assert run(arguments) == 2
    err = capsys.readouterr().err
    assert "'local' would start a Ray cluster of its own" in err and len(err.splitlines()) == 1
