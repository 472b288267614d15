"""Progress of commands that take more than a few seconds, on a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from megatron_fsdp_v2._progress import Advance, unwatched

try:
    from tqdm import tqdm as _bar
except ImportError:
    _bar: Any = None  # type: ignore[no-redef]

SILENT_S = 3.0
"""Seconds without a bar: most calls take less."""


@contextlib.contextmanager
def progress(label: str, unit: str = "B") -> Iterator[Advance]:
    """Show a bar on standard error while the context lasts.

    Without a terminal, or if tqdm is not installed, shows nothing.

    Args:
        label: Text in front of the bar.
        unit: Unit of the numbers.

    Yields:
        A function to call as work advances.
    """
    if _bar is None:
        yield unwatched
        return
    # `disable=None`: on a terminal only.
    with _bar(
        desc=label, unit=unit, unit_scale=True, delay=SILENT_S, disable=None, leave=False
    ) as bar:

        def advance(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield advance
