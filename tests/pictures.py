"""Checks of pictures that the packages draw."""

from __future__ import annotations

from pathlib import Path

from matplotlib.image import imread

from megatron_fsdp_v2._picture import INK


def has_clear_ground(path: Path) -> bool:
    """Return whether a PNG has a transparent ground and text that any page shows.

    The corners are transparent, and no opaque pixel is black or white.
    """
    pixels = imread(path)
    corners = pixels[[0, 0, -1, -1], [0, -1, 0, -1]]
    if pixels.shape[2] != 4 or corners[:, 3].any():
        return False
    gray = int(INK[1:3], 16) / 255
    opaque = pixels[pixels[:, :, 3] == 1][:, :3]
    has_ink = bool((abs(opaque - gray).max(axis=1) < 0.01).any())
    extremes = (opaque.max(axis=1) < 0.02) | (opaque.min(axis=1) > 0.98)
    return has_ink and not bool(extremes.any())
