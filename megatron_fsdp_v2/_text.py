"""Numbers for people."""

from __future__ import annotations

__all__ = ["readable_size"]


def readable_size(nbytes: float, digits: int = 1) -> str:
    """A number of bytes with its unit, such as `1.5 MiB`.

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
