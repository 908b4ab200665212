"""A real Mooncake store for tests and benchmarks: a master with its HTTP metadata server, and a process that lends
memory, all on loopback. What is started here is stopped here, by its process id, and dies with this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

START_SECONDS = 60.0
_PARENT_DEATH_SIGNAL = 1


def unavailable() -> str:
    """Why no Mooncake store can be started here; empty when one can."""
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    try:
        import mooncake.store  # noqa: F401
    except ImportError as error:
        return (
            f"the Mooncake package can't be imported ({error}): pip install 'hicache-ray[mooncake]', and on Debian "
            "apt-get install libibverbs1 librdmacm1 libnuma1 (make system-packages)"
        )
    return "" if _master_program() else "there is no program mooncake_master"


def _master_program() -> str | None:
    beside = Path(sys.executable).parent / "mooncake_master"
    return str(beside) if beside.exists() else shutil.which("mooncake_master")


class MooncakeCluster:
    """One master and one memory holder, on ports of their own.

    Args:
        memory_bytes: memory the holder lends.
        folder: where the processes' logs go.
        lease_ms: how long what was read or asked for is kept from eviction; short, so that tests need not wait.
    """

    def __init__(self, folder: Path, memory_bytes: int = 256 << 20, lease_ms: int = 1000) -> None:
        self.folder = folder
        self.memory_bytes = memory_bytes
        self._lease_ms = lease_ms
        self._ports = _free_ports(3)
        self._master: subprocess.Popen[bytes] | None = None
        self._holder: subprocess.Popen[bytes] | None = None

    @property
    def master_address(self) -> str:
        """host:port of the master."""
        return f"127.0.0.1:{self._ports[0]}"

    @property
    def metadata_server(self) -> str:
        """URL of the metadata server, which is part of the master."""
        return f"http://127.0.0.1:{self._ports[1]}/metadata"

    @property
    def url(self) -> str:
        """The store as a storage URL."""
        return f"mooncake://{self.master_address}?metadata={self.metadata_server}&segment=0&local_hostname=127.0.0.1"

    def options(self) -> dict[str, str | int]:
        """Options of a client that lends no memory."""
        return {
            "master_server_address": self.master_address,
            "metadata_server": self.metadata_server,
            "master_metrics_port": self._ports[2],
            "local_hostname": "127.0.0.1",
            "protocol": "tcp",
            "global_segment_size": 0,
        }

    def start(self) -> None:
        """Start master and holder; RuntimeError with the log's end when one does not come up."""
        self.start_master()
        self.start_holder()

    def start_master(self) -> None:
        """Start the master, on the ports it had before."""
        program = _master_program()
        assert program is not None
        rpc, metadata, metrics = self._ports
        command = [
            program,
            f"-rpc_port={rpc}",
            "-rpc_address=127.0.0.1",
            "-enable_http_metadata_server=true",
            "-http_metadata_server_host=127.0.0.1",
            f"-http_metadata_server_port={metadata}",
            "-metrics_host=127.0.0.1",
            f"-metrics_port={metrics}",
            f"-default_kv_lease_ttl={self._lease_ms}",
            "-eviction_high_watermark_ratio=0.9",
            "-client_ttl=5",
        ]
        self._master = self._popen("master", command)
        for port in (rpc, metadata):
            self._wait_for(lambda p=port: _accepts(p), "master", self._master)

    def start_holder(self) -> None:
        """Start the process that lends memory."""
        command = [sys.executable, "-m", __name__, self.metadata_server, self.master_address, str(self.memory_bytes)]
        self._holder = self._popen("holder", command)
        up = self.folder / "holder.log"
        self._wait_for(lambda: b"hicache holder is up" in up.read_bytes(), "holder", self._holder)

    def kill_master(self) -> None:
        """kill -9."""
        _kill(self._master)

    def kill_holder(self) -> None:
        """kill -9: the pages are gone with it."""
        _kill(self._holder)

    def freeze_master(self) -> None:
        """Stop the master without ending it: its connections stay open, and nothing answers."""
        assert self._master is not None
        os.kill(self._master.pid, signal.SIGSTOP)

    def thaw_master(self) -> None:
        """End `freeze_master`."""
        assert self._master is not None
        os.kill(self._master.pid, signal.SIGCONT)

    def stop(self) -> None:
        """End both processes."""
        for process in (self._holder, self._master):
            if process is not None and process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGCONT)
                process.terminate()
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    _kill(process)

    def _popen(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent
            )

    def _wait_for(self, condition: object, name: str, process: subprocess.Popen[bytes]) -> None:
        assert callable(condition)
        deadline, pause = time.monotonic() + START_SECONDS, threading.Event()
        while not condition():
            if process.poll() is not None or time.monotonic() > deadline:
                end = (self.folder / f"{name}.log").read_text(errors="replace")[-1000:]
                raise RuntimeError(f"the Mooncake {name} did not come up within {START_SECONDS} s: {end}")
            pause.wait(0.02)


def _kill(process: subprocess.Popen[bytes] | None) -> None:
    assert process is not None
    process.kill()
    process.wait()


def _accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def _hold(metadata_server: str, master_address: str, memory_bytes: str) -> None:
    """Lend memory until ended."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    code = store.setup("127.0.0.1", metadata_server, int(memory_bytes), 16 << 20, "tcp", "", master_address)
    if code:
        raise SystemExit(f"setup failed with code {code}")
    print("hicache holder is up", flush=True)
    signal.pause()


if __name__ == "__main__":
    _hold(*sys.argv[1:])
