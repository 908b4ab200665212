"""Keys of the radix tree: the whole pages of a token sequence, as memory, in a namespace."""

from __future__ import annotations

from typing import Any

from hicache_ray.hashing import EMPTY_NAMESPACE, TOKEN_BYTES, Namespace, Tokens, bigram_units, token_bytes


def page_bytes_of(page_size: int, bigram: bool) -> int:
    """Bytes one page of units takes in a key.

    Raises:
        ValueError: page_size is below 1.
    """
    if page_size < 1:
        raise ValueError(f"page_size is {page_size}; it must be at least 1 token")
    return page_size * TOKEN_BYTES * (2 if bigram else 1)


class Key:
    """The whole pages of a token sequence. Immutable; the tail that fills no page is cut (case 20).

    Attributes:
        units: the tokens as little-endian uint32, or with `bigram` the pairs of neighbours, 8 bytes each (case 5).
        page_bytes: bytes of one page of units.
        pages: number of pages.
        namespace: what the key must not be shared across.
        seed: the namespace's seed, which separates namespaces in the tree (case 19).
        bigram: the units are pairs of tokens; a prefix of the key keeps the flag (D10).
        cut_from: the key this one is a prefix of, or None: of two keys cut from one, one is a prefix of the other.
    """

    __slots__ = ("bigram", "cut_from", "namespace", "page_bytes", "pages", "seed", "units")

    def __init__(self, units: bytes, page_bytes: int, namespace: Namespace, bigram: bool) -> None:
        """Takes `units` as they are; `Key.of` is the checked way to make a key."""
        self.pages = len(units) // page_bytes
        whole = self.pages * page_bytes
        self.units = units if whole == len(units) else units[:whole]
        self.page_bytes = page_bytes
        self.namespace = namespace
        self.seed = namespace.seed
        self.bigram = bigram
        self.cut_from: Key | None = None

    @classmethod
    def of(
        cls, tokens: Tokens | bytes, page_size: int, *, namespace: Namespace = EMPTY_NAMESPACE, bigram: bool = False
    ) -> Key:
        """The key of a token sequence.

        Args:
            tokens: token ids of shape [tokens], or bytes that are units already (4 bytes each, with `bigram` 8).
            page_size: units a page.
            namespace: adapter, salt and tenant.
            bigram: pair the tokens (EAGLE): N tokens make N-1 units.

        Raises:
            TokenRangeError: a token does not fit 32 unsigned bits (case 4).
            ValueError: page_size is below 1.
        """
        page_bytes = page_bytes_of(page_size, bigram)
        if not isinstance(tokens, bytes):
            tokens = bigram_units(tokens) if bigram else token_bytes(tokens)
        return cls(tokens, page_bytes, namespace, bigram)

    def prefix(self, pages: int) -> Key:
        """The first `pages` pages of this key, in the same namespace and of the same kind."""
        if pages >= self.pages:
            return self
        part = Key(self.units[: max(pages, 0) * self.page_bytes], self.page_bytes, self.namespace, self.bigram)
        part.cut_from = self.cut_from or self
        return part

    def starts_with(self, other: Key, pages: int) -> bool:
        """Whether this key and `other` agree in namespace and in their first `pages` pages."""
        size = pages * self.page_bytes
        if self.seed != other.seed or size > len(self.units) or size > len(other.units):
            return False
        if (self.cut_from or self) is (other.cut_from or other):
            return True
        return self.units.startswith(memoryview(other.units)[:size])

    def __eq__(self, other: Any) -> bool:
        return self._content == other._content if isinstance(other, Key) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._content)

    @property
    def _content(self) -> tuple[bytes, int, bytes, bool]:
        return self.units, self.page_bytes, self.seed, self.bigram

    def __repr__(self) -> str:
        return f"Key({self.pages} pages of {self.page_bytes} bytes, {self.namespace})"
