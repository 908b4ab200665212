"""What a Mooncake store answers, and what that means for a page (mooncake-store's ErrorCode)."""

from __future__ import annotations

import enum

NO_SPACE = -200
TOO_SMALL = -600
NOT_READY = -703
NOT_FOUND = -704
EXISTS = -705
LEASE_EXPIRED = -707
GONE = -712


class Answer(enum.Enum):
    """An answer's meaning."""

    OK = "ok"
    MISSING = "missing"
    """The page is not there, or not yet, or no more."""
    CORRUPT = "corrupt"
    """There is something else under its key."""
    AGAIN = "again"
    """The lease ran out while the bytes came: they may be another page's. Asking once more gets a new lease."""
    FULL = "full"
    """No room: the store frees some by itself as leases run out."""
    FAILED = "failed"
    """The store or the way to it failed."""


_READS = {
    NOT_FOUND: Answer.MISSING,
    NOT_READY: Answer.MISSING,
    GONE: Answer.MISSING,
    TOO_SMALL: Answer.CORRUPT,
    LEASE_EXPIRED: Answer.AGAIN,
}
_WRITES = {0: Answer.OK, EXISTS: Answer.OK, NO_SPACE: Answer.FULL}


def read_answer(code: int, expected: int) -> Answer:
    """Meaning of `batch_get_into`'s number for an object: its bytes (`expected` of them are wanted) or an error."""
    if code == expected:
        return Answer.OK
    return Answer.CORRUPT if code >= 0 else _READS.get(code, Answer.FAILED)


def write_answer(code: int) -> Answer:
    """Meaning of `batch_put_from`'s number for an object. OK is said too when another client is just writing it."""
    return _WRITES.get(code, Answer.FAILED)
