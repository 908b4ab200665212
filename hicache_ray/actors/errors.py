"""What a group tells its caller when a step can't be answered."""

from __future__ import annotations


class GroupError(RuntimeError):
    """A group can't answer; the text names the group, the step and what happened."""


class StepTimeout(GroupError):
    """A rank did not answer a step within its deadline."""


class RankDied(GroupError):
    """A rank's actor is gone, or reported an error that ends it."""


class DivergenceError(GroupError):
    """Ranks answered one step differently: their replicas of the tree are no longer equal."""


class StepCollision(RuntimeError):
    """Ranks met in one reduction with steps of different drivers; none of them was applied anywhere."""


class StaleGeneration(RuntimeError):
    """A step was sent to a generation of the group that is over."""


class GroupRestarted(GroupError):
    """The group was rebuilt: requests that were in flight on it have to be sent again."""
