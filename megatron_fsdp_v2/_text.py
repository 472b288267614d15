"""Text formatting for reports and messages: sizes, tables, lists with "and N more"."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Collection, Iterable, Sequence
from typing import Any, override

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)}
_UNITS |= {f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)}


def readable_size(nbytes: float, digits: int = 1) -> str:
    """Format a number of bytes with its unit, such as `1.5 MiB`.

    Args:
        nbytes: Bytes.
        digits: Digits after the point; bytes have none.
    """
    size, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.{digits}f} {unit}"


def compact(number: int, base: int, suffixes: Sequence[str] = "KMGT") -> str:
    """Format a number for a narrow column: about three digits and a letter, such as `1.5M`.

    Args:
        number: Not negative.
        base: Ratio of neighboring suffixes: 1024 for bytes, 1000 for counts.
        suffixes: Letters, the smallest unit first.
    """
    if number < base:
        return str(number)
    power = 1
    while power < len(suffixes) and number / base**power >= base - 0.5:
        power += 1
    value = number / base**power
    return f"{value:.{1 if value < 99.95 else 0}f}{suffixes[power - 1]}"


def parse_size(text: str) -> int:
    """Parse a size such as `5GB`, `1.5 MiB` or `5000` (bytes) into bytes.

    Args:
        text: A positive number and a unit, decimal (`KB` to `TB`) or binary (`KiB` to `TiB`), in
            upper or lower case.

    Raises:
        ValueError: `text` is not a size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?b?)", text.lower())
    if match is None or match[2] not in _UNITS or float(match[1]) <= 0:
        raise ValueError(f"{text!r} is not a size, such as 5GB or 500MiB")
    return max(1, int(float(match[1]) * _UNITS[match[2]]))


_MOST_CHARACTERS = 500
_NUMBER = 1 << 64


class _Repr(reprlib.Repr):
    """Formats plain data in a bounded time; other objects are formatted as their class."""

    @override
    def repr_instance(self, x: Any, level: int) -> str:
        is_plain = x is None or isinstance(x, bool | float | bytes)
        return shortened(repr(x[:_SHOWN] if isinstance(x, bytes) else x if is_plain else type(x)))

    @override
    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if abs(x) < _NUMBER else f"a number of {x.bit_length()} bits"


_SHOWN = 60
_repr = _Repr(maxlevel=2, maxstring=_SHOWN)


def shown(value: object) -> str:
    """Format a value of a file for a message: its beginning, however large or nested it is."""
    return shortened(_repr.repr(value))


def shortened(text: str, most: int = _MOST_CHARACTERS) -> str:
    """Return a text, or its beginning and end if it has more characters."""
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-most // 2 :]}"


def listed(items: Iterable[object], most: int, *, separator: str = ", ") -> str:
    """Format the first items and the number of the rest, such as `a, b and 3 more`.

    Args:
        items: The items, in order.
        most: Maximum number of items to name.
        separator: Separates items; a separator other than a comma also precedes "and".
    """
    texts = [shortened(str(item)) for item in items]
    shown, left = separator.join(texts[:most]), len(texts) - most
    if left <= 0:
        return shown
    lead = " " if separator == ", " else separator
    return f"{shown}{lead}and {left} more"


def listed_ranks(ranks: Sequence[int]) -> str:
    """Format numbers of ranks, such as `rank 2` or `ranks 0, 1`; at most 8 of them."""
    return f"rank{'s' if len(ranks) != 1 else ''} {listed(ranks, 8)}"


def aligned(
    rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,), separator: str = "  "
) -> list[str]:
    """Format rows as lines with aligned columns.

    Args:
        rows: Cells of every line; the same number in each.
        left: Columns that are aligned to the left; others are aligned to the right.
        separator: Text between two columns.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        separator.join(
            cell.ljust(width) if number in left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def table(
    rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,), separator: str = "  "
) -> list[str]:
    """Format rows with `aligned`, with a rule below the header, the first row."""
    lines = aligned(rows, left=left, separator=separator)
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]
