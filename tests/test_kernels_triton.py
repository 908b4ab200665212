"""The Triton kernels: byte-exact in Triton's interpreter, compiled for a GPU without one, and when others step in."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys

import numpy as np
import pytest

from hicache_ray.kernels import table
from hicache_ray.pools.device import DevicePool
from hicache_ray.pools.host import HostPool
from hicache_ray.pools.layouts import KVSpec
from tests.conftest import REPOSITORY

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
ONE = np.zeros(1, dtype=np.int64)


@needs_triton
def test_kernels_equal_the_reference_in_the_interpreter(capsys: pytest.CaptureFixture[str]) -> None:
    """A process of its own: Triton decides on import whether it interprets."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels_matrix"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("128 combinations on Triton equal the reference, 128 fall back")
    with capsys.disabled():
        print(f"\n{done.stdout.strip()}")


SHAPES = {
    "rows of 2048 bytes": {"PAGE": 64, "HEADS": 1, "WIDTH": 256, "ROWS": 16, "BLOCK": 256},
    "heads of 192 bytes": {"PAGE": 16, "HEADS": 3, "WIDTH": 24, "ROWS": 128, "BLOCK": 32},
    "latent of 1152 bytes": {"PAGE": 1, "HEADS": 1, "WIDTH": 144, "ROWS": 16, "BLOCK": 256},
}


@needs_triton
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton interprets in this process")
@pytest.mark.parametrize("to_host", [True, False], ids=["backup", "load"])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_compile_for_a_gpu(shape: str, to_host: bool) -> None:
    """To machine code for sm_90, with the integer arguments that a launch may turn into constants as constants."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from hicache_ray.kernels.triton_copy import copy_rows

    constants = {"UNIT": tl.int64, "TO_HOST": to_host, "layer_span": 1, "token_stride": 1, **SHAPES[shape]}
    types = {"layer_pointers": "*i64", "pages": "*i64", "host_address": "i64", "plane_bytes": "i64"}
    names = copy_rows.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    compiled = triton.compile(ASTSource(copy_rows, signature, constexprs=values), target=GPUTarget("cuda", 90, 32))
    assert len(compiled.asm["cubin"]) > 1000


def copied(spec: KVSpec, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What two copies of the kernel backend log."""
    device, host = DevicePool(spec, 2, 2), HostPool(spec, 2, 2, "page_first", pin=False)
    device.key_buffer(0)[:] = 1
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            copies = table.copies_between("kernel", device, host)
            copies.backup(copies.plan(ONE, ONE))
    assert host.read_page(0).any()
    return [record.message for record in caplog.records]


def test_without_a_gpu_the_kernel_backend_copies_like_direct_and_says_so_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "_said", set())
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    messages = copied(KVSpec.mha(2, 1, 4), caplog)
    assert len(messages) == 1
    assert "io backend kernel copies like direct here: " in messages[0]


@needs_triton
def test_width_that_the_kernels_do_not_move_falls_back(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Imported before the setting is made, so that only this question, and no later test, is under the interpreter.
    importlib.import_module("hicache_ray.kernels.triton_copy")
    monkeypatch.setattr(table, "_said", set())
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    messages = copied(KVSpec.mha(2, 1, 5, "int8"), caplog)
    assert messages == ["io backend kernel copies like direct here: rows of 5 bytes are no multiple of 4 bytes"]


def test_without_triton_the_kernel_backend_copies_like_direct(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "_said", set())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    messages = copied(KVSpec.mha(2, 1, 4), caplog)
    assert messages == ["io backend kernel copies like direct here: triton is not installed"]
