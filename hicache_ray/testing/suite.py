"""The conformance suite of storage backends. A backend joins with one line in any test module, of any repository:

    TestMine = storage_suite("my_package.store:MyStorage", {"path": "{folder}/pages"})

Every test states a promise of `storage.base`. What a store cannot be asked is skipped with the reason; the table of
backend x test is printed at the end of the run (`suite_table`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import pytest

from hicache_ray.storage.base import Storage
from hicache_ray.testing.subject import StorageSubject

# Before the imports, so that their assertions say what they compared.
for _name in ("suite_base", "suite_pages", "suite_faults"):
    if f"hicache_ray.testing.{_name}" not in sys.modules:
        pytest.register_assert_rewrite(f"hicache_ray.testing.{_name}")

from hicache_ray.testing.suite_base import SuiteBase  # noqa: E402
from hicache_ray.testing.suite_faults import DamageTests, FaultTests, OutageTests  # noqa: E402
from hicache_ray.testing.suite_pages import ConcurrencyTests, KeyTests, PageTests  # noqa: E402


class StorageSuite(OutageTests, DamageTests, FaultTests, ConcurrencyTests, KeyTests, PageTests):
    """All tests of a backend; `storage_suite` makes one for a store."""


def storage_suite(
    backend: str | type[Storage] | StorageSubject, extra: Mapping[str, Any] | None = None
) -> type[SuiteBase]:
    """The suite for a backend, to be bound to a name that begins with Test.

    Args:
        backend: a registered name, "module:Class" or a class, made from a StorageConfig; or a StorageSubject, which
            can also start the store's server and damage its pages.
        extra: options of the backend; "{folder}" in a text becomes each test's own empty folder. Not with a subject.
    """
    subject = backend if isinstance(backend, StorageSubject) else StorageSubject(backend, extra)
    return type("StorageSuite", (StorageSuite,), {"store": subject, "__doc__": f"The suite for {subject.name}."})
