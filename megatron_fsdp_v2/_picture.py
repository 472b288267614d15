"""The style of pictures: a transparent ground, readable on a light and on a dark page."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager

INK = "#808080"
"""Color of text and lines: a gray with a contrast of about 4 to both white and black pages."""

_INKED = (
    *("axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "grid.color", "legend.edgecolor"),
    *("text.color", "xtick.color", "ytick.color"),
)


def picture_style() -> AbstractContextManager[None]:
    """Return a context in which matplotlib draws and saves figures in this style.

    Raises:
        ImportError: matplotlib is not installed.
    """
    style = {"savefig.transparent": True, "legend.facecolor": "none", **dict.fromkeys(_INKED, INK)}
    context: AbstractContextManager[None] = importlib.import_module("matplotlib").rc_context(style)
    return context
