"""Storage URLs."""

from __future__ import annotations

from typing import Any

import pytest

from hicache_ray.storage.registry import BackendError, parse_storage_url


@pytest.mark.parametrize(
    ("url", "backend", "extra"),
    [
        ("ray", "ray", {}),
        ("ray://pool-a?namespace=prod", "ray", {"pool": "pool-a", "namespace": "prod"}),
        ("file:///data/kv", "file", {"directory": "/data/kv"}),
        (
            "file:///data/a%20b?max_bytes=100gb&fsync=1",
            "file",
            {"directory": "/data/a b", "max_bytes": "100gb", "fsync": "1"},
        ),
        (
            "mooncake://127.0.0.1:50051?metadata=http://127.0.0.1:8080/metadata",
            "mooncake",
            {"master_server_address": "127.0.0.1:50051", "metadata_server": "http://127.0.0.1:8080/metadata"},
        ),
        (
            "mooncake://m:1?segment=4GB&tag=a&device=mlx5_0&protocol=rdma",
            "mooncake",
            {
                "master_server_address": "m:1",
                "global_segment_size": "4GB",
                "extra_backend_tag": "a",
                "device_name": "mlx5_0",
                "protocol": "rdma",
            },
        ),
        (
            "dynamic://my.package.store/Store?interface_v1=1",
            "dynamic",
            {
                "backend_name": "Store",
                "module_path": "my.package.store",
                "class_name": "Store",
                "interface_v1": "1",
            },
        ),
    ],
)
def test_backend_and_options(url: str, backend: str, extra: dict[str, Any]) -> None:
    assert parse_storage_url(url) == (backend, extra)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("", "none of ray, file"),
        ("s3://bucket", "none of ray, file"),
        ("file", "none of ray, file"),
        ("file://data/kv", "file:///DIR, with three slashes"),
        ("file:///", "file:///DIR"),
        ("mooncake://", "names no master"),
        ("mooncake://host", "names no master"),
        ("mooncake://host:port", "Port could not be cast"),
        ("dynamic://module", "names no class"),
    ],
)
def test_what_is_no_storage_url_is_refused(url: str, text: str) -> None:
    with pytest.raises(BackendError, match=text):
        parse_storage_url(url)
