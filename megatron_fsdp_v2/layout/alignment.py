"""Where views of a flat buffer may start: at lines of memory, or at least at words of 16 bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["LINE_NBYTES", "UNALIGNED", "WORD_NBYTES", "Alignment"]

LINE_NBYTES = 128
"""A line of a GPU's cache. Kernels and collectives are fastest from a multiple of it on."""

WORD_NBYTES = 16
"""The widest load of a GPU's thread. Some kernels, grouped products among them, need this much."""


@dataclass(frozen=True, slots=True)
class Alignment:
    """What the starts of slices and parameters are multiples of, in elements.

    Attributes:
        line: Slices, and parameters of at least a line, start at multiples of it. A power of two.
        word: Shorter parameters, which may share a line, start at multiples of it. A power of two,
            not above `line`.
    """

    line: int = 1
    word: int = 1

    @classmethod
    def of(cls, itemsize: float) -> Alignment:
        """The strongest one for elements of so many bytes, a power of two; 0.5 of half a byte."""
        return cls(int(max(LINE_NBYTES // itemsize, 1)), int(max(WORD_NBYTES // itemsize, 1)))

    def start(self, numel: int) -> int:
        """What the start of a parameter of so many elements is a multiple of."""
        return self.line if numel >= self.line else self.word

    def stride(self, numel: int, granule: int) -> int:
        """Elements after which a parameter may be cut, counted from its start.

        Start and boundary are aligned, and what is between them is whole granules.
        """
        return math.lcm(granule, self.start(numel))

    def weaker(self) -> Alignment:
        """The next one to try: half the line, down to a word; then `UNALIGNED`."""
        return Alignment(self.line // 2, self.word) if self.line > self.word else UNALIGNED


UNALIGNED = Alignment()
"""Slices and parameters start anywhere."""
