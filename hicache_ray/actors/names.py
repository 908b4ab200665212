"""Names under which the actors of a service are found."""

from __future__ import annotations

RAY_NAMESPACE = "hicache_ray"
"""Ray namespace of all named actors of this package."""


def group_name(service: str, group: str) -> str:
    """Full name of a group, unique in the cluster."""
    return f"{service}:{group}"


def rank_name(group: str, rank: int) -> str:
    """Name of a rank's actor, from its group's full name."""
    return f"{group}:rank{rank}"


def supervisor_name(service: str) -> str:
    """Name of a service's supervisor actor."""
    return f"{service}:supervisor"
