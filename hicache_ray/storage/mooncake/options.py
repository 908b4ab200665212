"""Options of the Mooncake backend, under SGLang's names: extra config, then a JSON file, then the environment."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from hicache_ray.hashing import ModelIdentity
from hicache_ray.storage.options import (
    KEY_STYLES,
    Reader,
    backend_options,
    read_bool,
    read_choice,
    read_count,
    read_size,
    read_text,
)
from hicache_ray.storage.registry import BackendError

CONFIG_PATH_VARIABLES = ("SGLANG_HICACHE_MOONCAKE_CONFIG_PATH", "MOONCAKE_CONFIG_PATH")


# SGLang reads the same options and variables: a gb must be as large here as there.
_memory = partial(read_size, kilo=1024)


class _Source(NamedTuple):
    """Where an option's value may come from beside the extra config and the file."""

    variables: tuple[str, ...]
    default: Any
    read: Reader = read_text


OPTIONS: dict[str, _Source] = {
    "master_server_address": _Source(("MOONCAKE_MASTER",), ""),
    "metadata_server": _Source(("MOONCAKE_TE_META_DATA_SERVER",), "P2PHANDSHAKE"),
    "local_hostname": _Source(("MOONCAKE_LOCAL_HOSTNAME", "LOCAL_HOSTNAME"), "localhost"),
    "protocol": _Source(("MOONCAKE_PROTOCOL",), "tcp"),
    "device_name": _Source(("MOONCAKE_DEVICE",), ""),
    "global_segment_size": _Source(("MOONCAKE_GLOBAL_SEGMENT_SIZE",), "4gb", _memory),
    "local_buffer_size": _Source(("SGLANG_MOONCAKE_LOCAL_BUFFER_SIZE",), "16mb", _memory),
    "master_metrics_port": _Source(("MOONCAKE_MASTER_METRICS_PORT",), 9003, read_count),
    "check_server": _Source(("MOONCAKE_CHECK_SERVER",), False, read_bool),
    "setup_timeout": _Source((), 60, read_count),
    "extra_backend_tag": _Source((), ""),
    "key_style": _Source((), "full", partial(read_choice, choices=KEY_STYLES)),
}
"""Every option of the backend, with its sources beside the extra config."""


@dataclass(frozen=True)
class MooncakeOptions:
    """What a client of a Mooncake store needs to know.

    Attributes:
        master_server_address: host:port of `mooncake_master`.
        metadata_server: URL of the metadata server, or "P2PHANDSHAKE".
        local_hostname: this host's name or address, as the other clients reach it.
        protocol: "tcp" or "rdma".
        device_name: RDMA devices, or a JSON object {"<tp rank>": "<devices>"}.
        global_segment_size: bytes of memory that the ranks of an instance lend to the store together, as in SGLang;
            with 0 other processes hold the pages. What a process lends is lost with it.
        local_buffer_size: bytes of the client's own buffer.
        master_metrics_port: HTTP port of the master, for `check_server`.
        check_server: wait at start, up to `setup_timeout` seconds, until the store is up and has memory, and refuse to
            start without it. Otherwise a store that is not there yet is all misses until it is.
        extra_backend_tag: put before every key, so that several users of one store keep apart.
        key_style: "full" (whole identity, one object a page, checksum) or "sglang" (case 10: shared with SGLang, no
            checksum).
    """

    master_server_address: str
    metadata_server: str
    local_hostname: str
    protocol: str
    device_name: str
    global_segment_size: int
    local_buffer_size: int
    master_metrics_port: int
    check_server: bool
    setup_timeout: int
    extra_backend_tag: str
    key_style: str

    @classmethod
    def parse(cls, extra: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> MooncakeOptions:
        """Each option from the first source that has it.

        Raises:
            BackendError: a value that does not fit, an unknown name, an unreadable file, or no master address.
        """
        given = backend_options("mooncake", extra, {name: source.read for name, source in OPTIONS.items()})
        environment = os.environ if environment is None else environment
        file = _read_file(environment)
        missing = [name for name in OPTIONS if name not in given]
        options = cls(**given, **{name: _value(name, OPTIONS[name], file, environment) for name in missing})
        if not options.master_server_address:
            raise BackendError(
                "storage backend 'mooncake' needs the master's address: set the option master_server_address, or "
                "MOONCAKE_MASTER, to host:port"
            )
        return options

    def check(self, identity: ModelIdentity) -> None:
        """BackendError for what can't work on this rank, however well the store is."""
        self.servers()
        self.device_of(identity.tp_rank)

    def device_of(self, tp_rank: int) -> str:
        """The RDMA devices of a rank."""
        if not self.device_name.startswith("{"):
            return self.device_name
        try:
            by_rank = json.loads(self.device_name)
        except ValueError as error:
            raise BackendError(f"device_name {self.device_name!r} is no JSON: {error}") from error
        if str(tp_rank) not in by_rank:
            raise BackendError(f"device_name {self.device_name!r} names no devices for rank {tp_rank}")
        return str(by_rank[str(tp_rank)])

    def segment_of(self, identity: ModelIdentity) -> int:
        """Bytes that one rank lends."""
        return self.global_segment_size // (identity.tp_size * identity.pp_size)

    def servers(self) -> list[tuple[str, int]]:
        """Host and port of the servers that must answer before the client is set up, where they can be told."""
        addresses = [f"//{self.master_server_address}"] if "://" not in self.master_server_address else []
        if self.metadata_server.startswith("http"):
            addresses.append(self.metadata_server)
        try:
            parts = [urlsplit(address) for address in addresses]
            return [(part.hostname or "", part.port or 80) for part in parts]
        except ValueError as error:
            raise BackendError(f"no host:port in {' and '.join(addresses)}: {error}") from error


def _read_file(environment: Mapping[str, str]) -> Mapping[str, Any]:
    path = next((environment[name] for name in CONFIG_PATH_VARIABLES if environment.get(name)), None)
    if path is None:
        return {}
    try:
        content = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise BackendError(f"Mooncake configuration file {path!r} can't be read: {error}") from error
    if not isinstance(content, dict):
        raise BackendError(f"Mooncake configuration file {path!r} holds no JSON object")
    return content


def _value(name: str, source: _Source, file: Mapping[str, Any], environment: Mapping[str, str]) -> Any:
    if file.get(name) is not None:
        return source.read(name, file[name])
    variable = next((variable for variable in source.variables if variable in environment), None)
    return source.read(variable, environment[variable]) if variable else source.read(name, source.default)
