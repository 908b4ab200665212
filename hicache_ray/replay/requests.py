"""One request of a workload, as the driver sends it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hicache_ray.hashing import EMPTY_NAMESPACE, Namespace

Tokens = npt.NDArray[np.uint32]


@dataclass(frozen=True, eq=False)
class ReplayRequest:
    """A prompt and the answer the model will give to it.

    Attributes:
        rid: unique in the workload.
        prompt: token ids [prompt tokens], at least one.
        output: token ids [answer tokens].
        namespace: adapter, salt and tenant it belongs to.
        priority: of its KV in the cache.
        after: rid of a request whose answer is part of this prompt: it has to end first.
    """

    rid: str
    prompt: Tokens
    output: Tokens
    namespace: Namespace = EMPTY_NAMESPACE
    priority: int = 0
    after: str | None = None


class BlockRequest(NamedTuple):
    """A request as its trace's blocks alone, for an index that takes one block as one page."""

    blocks: Tokens
    """Block ids numbered in order of first appearance, one for each block of the prompt."""
    tokens: int
    """Prompt tokens."""
