"""Backends of other packages, named by module and class in the options, as SGLang's `dynamic` backend does.

A class is either one of ours (a subclass of `Storage` or `PageStorage`, made from a StorageConfig) or one written for
SGLang (made as `cls(storage_config, {})`, reached through `SGLangClassStorage`).
"""

from __future__ import annotations

import importlib
from typing import Any

from hicache_ray.storage.base import Storage, StorageConfig
from hicache_ray.storage.registry import BackendError
from hicache_ray.storage.sglang.storage import SGLangClassStorage

REQUIRED_OPTIONS = ("backend_name", "module_path", "class_name")


def make_dynamic_storage(config: StorageConfig) -> Storage:
    """Make the backend that `module_path` and `class_name` of the options name.

    Raises:
        BackendError: an option is missing, the module or class can't be imported, the class is no storage backend, or
            its constructor fails.
    """
    missing = [name for name in REQUIRED_OPTIONS if not config.extra.get(name)]
    if missing:
        raise BackendError(
            f"storage backend 'dynamic' needs the options {', '.join(REQUIRED_OPTIONS)}; missing: {', '.join(missing)}"
        )
    name, path, class_name = (str(config.extra[option]) for option in REQUIRED_OPTIONS)
    found = _load(name, path, class_name)
    try:
        if issubclass(found, Storage):
            return found(config)
        return SGLangClassStorage(config, found)
    except BackendError:
        raise
    except Exception as error:
        raise BackendError(f"storage backend {name!r}: {path}.{class_name} could not be made: {error}") from error


def _load(name: str, path: str, class_name: str) -> type[Any]:
    try:
        module = importlib.import_module(path)
    except ImportError as error:
        raise BackendError(
            f"storage backend {name!r}: module_path {path!r} can't be imported ({error}); install the package that has "
            "it, or put its folder on PYTHONPATH"
        ) from error
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        raise BackendError(f"storage backend {name!r}: {path!r} has no class {class_name!r} (class_name)")
    return found
