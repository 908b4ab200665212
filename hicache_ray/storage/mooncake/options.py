"""Options of the Mooncake backend, under SGLang's names: extra config, then a JSON file, then the environment."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
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


class _Source(NamedTuple):
    """Where an option's value may come from beside the extra config and the file."""

    variables: tuple[str, ...]
    default: Any
    read: Reader


def _option(*variables: str, default: Any, read: Reader = read_text) -> Any:
    return field(metadata={"source": _Source(variables, default, read)})


# SGLang reads the same options and variables: a gb must be as large here as there.
_memory = partial(read_size, kilo=1024)


@dataclass(frozen=True)
class MooncakeOptions:
    """What a client of a Mooncake store needs to know."""

    master_server_address: str = _option("MOONCAKE_MASTER", default="")
    """host:port of `mooncake_master`."""
    metadata_server: str = _option("MOONCAKE_TE_META_DATA_SERVER", default="P2PHANDSHAKE")
    """URL of the metadata server, or "P2PHANDSHAKE"."""
    local_hostname: str = _option("MOONCAKE_LOCAL_HOSTNAME", "LOCAL_HOSTNAME", default="localhost")
    """This host's name or address, as the other clients reach it."""
    protocol: str = _option("MOONCAKE_PROTOCOL", default="tcp")
    """Either "tcp" or "rdma"."""
    device_name: str = _option("MOONCAKE_DEVICE", default="")
    """RDMA devices, or a JSON object {"<tp rank>": "<devices>"}."""
    global_segment_size: int = _option("MOONCAKE_GLOBAL_SEGMENT_SIZE", default="4gb", read=_memory)
    """Bytes of memory that the ranks of an instance lend to the store together, as in SGLang; with 0 other processes
    hold the pages. What a process lends is lost with it."""
    local_buffer_size: int = _option("SGLANG_MOONCAKE_LOCAL_BUFFER_SIZE", default="16mb", read=_memory)
    """Bytes of the client's own buffer."""
    master_metrics_port: int = _option("MOONCAKE_MASTER_METRICS_PORT", default=9003, read=read_count)
    """HTTP port of the master, for `check_server`."""
    check_server: bool = _option("MOONCAKE_CHECK_SERVER", default=False, read=read_bool)
    """Wait at start, up to `setup_timeout` seconds, until the store is up and has memory, and refuse to start without
    it. Otherwise a store that is not there yet is all misses until it is."""
    setup_timeout: int = _option(default=60, read=read_count)
    extra_backend_tag: str = _option(default="")
    """Put before every key, so that several users of one store keep apart."""
    key_style: str = _option(default="full", read=partial(read_choice, choices=KEY_STYLES))
    """Either "full" (whole identity, one object a page, checksum) or "sglang" (case 10: shared with SGLang, no
    checksum)."""

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


OPTIONS: dict[str, _Source] = {entry.name: entry.metadata["source"] for entry in fields(MooncakeOptions)}
"""Every option of the backend, with its sources beside the extra config."""


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
