"""What goes wrong with a group of actors, beside what goes wrong with any group (`rank.group`)."""

from __future__ import annotations

from hicache_ray.rank.group import GroupError


class StepTimeout(GroupError):
    """A rank did not answer a step within its deadline."""


class RankDied(GroupError):
    """A rank's actor is gone, or reported an error that ends it."""


class StepCollision(RuntimeError):
    """Ranks met in one reduction with steps of different drivers; none of them was applied anywhere."""


class StaleGeneration(RuntimeError):
    """A step was sent to a generation of the group that is over."""
