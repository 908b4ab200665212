"""What every cell of the table must do, as plain torch on the shapes of case 55: slow, obvious, for tests.

One small function per host layout says where a token of a layer lies; nothing here is shared with the fast paths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from hicache_ray.pages import Pages, slots_of
from hicache_ray.pools.device import DevicePool
from hicache_ray.pools.host import HostPool

Place = Callable[[torch.Tensor, int, int, int, int, int], torch.Tensor]


def _layer_first(buffer: torch.Tensor, layer: int, page: int, token: int, head: int, size: int) -> torch.Tensor:
    return buffer[layer, page * size + token, head]


def _page_first(buffer: torch.Tensor, layer: int, page: int, token: int, head: int, size: int) -> torch.Tensor:
    return buffer[page * size + token, layer, head]


def _page_first_direct(buffer: torch.Tensor, layer: int, page: int, token: int, head: int, size: int) -> torch.Tensor:
    return buffer[page, layer, token, head]


def _page_head(buffer: torch.Tensor, layer: int, page: int, token: int, head: int, size: int) -> torch.Tensor:
    return buffer[page, head, token, layer]


PLACES: dict[str, Place] = {
    "layer_first": _layer_first,
    "page_first": _page_first,
    "page_first_direct": _page_first_direct,
    "page_head": _page_head,
    "page_first_kv_split": _page_first_direct,
}


def backup(device_pool: DevicePool, host_pool: HostPool, device_pages: Pages, host_pages: Pages) -> None:
    """All layers of the pages, L1 -> L2, one head of one token at a time."""
    for layer in range(device_pool.spec.layers):
        for in_device, in_host in _pairs(device_pool, host_pool, device_pages, host_pages, layer):
            in_host.copy_(in_device)


def load_layer(
    device_pool: DevicePool, host_pool: HostPool, device_pages: Pages, host_pages: Pages, layer: int
) -> None:
    """One layer of the pages, L2 -> L1, one head of one token at a time."""
    for in_device, in_host in _pairs(device_pool, host_pool, device_pages, host_pages, layer):
        in_device.copy_(in_host)


def poison(pool: DevicePool, pages: Pages) -> None:
    """Overwrites pages with 0xFF bytes in every layer, NaN or -1: a page that is not loaded must be seen."""
    slots = torch.from_numpy(slots_of(pages, pool.page_size)).to(pool.device)
    for plane in pool.layers:
        for tensor in plane:
            tensor.view(torch.uint8)[slots] = 0xFF


def _pairs(
    device_pool: DevicePool, host_pool: HostPool, device_pages: Pages, host_pages: Pages, layer: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    size, place = host_pool.page_size, PLACES[host_pool.layout]
    for device_plane, host_buffer in _planes(device_pool, host_pool, layer):
        for device_page, host_page in zip(device_pages.tolist(), host_pages.tolist(), strict=True):
            for token in range(size):
                for head in range(device_pool.spec.heads):
                    in_device = device_plane[device_page * size + token, head]
                    yield in_device, place(host_buffer, layer, host_page, token, head, size)


def _planes(device_pool: DevicePool, host_pool: HostPool, layer: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    if device_pool.spec.attention == "mha":
        buffers = (host_pool.k_buffer, host_pool.v_buffer)
        return [(device_pool.layers[plane][layer], buffers[plane]) for plane in range(2)]
    latent = device_pool.layers[0][layer]
    if host_pool.layout != "page_first_kv_split":
        return [(latent, host_pool.kv_buffer)]
    rank = device_pool.spec.latent_dim - device_pool.spec.rope_dim
    return [(latent[..., :rank], host_pool.k_buffer), (latent[..., rank:], host_pool.v_buffer)]
