"""What a check is, and what may come of it."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class Status(enum.Enum):
    """What came of a check."""

    PASSED = "passed"
    FAILED = "failed"
    NEEDS_GPU = "needs a GPU"
    NEEDS_RANKS = "needs more ranks"
    NEEDS_LAYERS = "needs Transformer Engine"
    NOT_SUPPORTED = "not supported yet"


@dataclass(frozen=True)
class Request:
    """What the user asked for, as a check sees it.

    Attributes:
        device: `cuda` or `cpu`.
        ranks: The most ranks a check may use.
        folder: Where the check may write; its own.
        is_small: Whether it does as little as still shows that it runs.
    """

    device: str
    ranks: int
    folder: Path
    is_small: bool = False

    @property
    def on_cuda(self) -> bool:
        """Whether checks run on GPUs."""
        return self.device == "cuda"


@dataclass(frozen=True)
class Outcome:
    """What a check found.

    Attributes:
        status: What came of it.
        text: Why, in a line or a traceback.
        numbers: What was measured, by name.
        pictures: Files it drew, in its folder.
    """

    status: Status
    text: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)
    pictures: tuple[str, ...] = ()

    @classmethod
    def of(cls, holds: bool, text: str, **numbers: Any) -> Outcome:
        """Passed or failed, by whether a claim holds."""
        return cls(Status.PASSED if holds else Status.FAILED, text, numbers)


@dataclass(frozen=True)
class Check:
    """One claim, and how to find out.

    Attributes:
        name: Unique.
        proves: The claim, in a sentence.
        run: Finds out. An exception is a failure.
        least_ranks: Ranks that it needs.
        only_cuda: Whether a CPU shows nothing of it. Then `run` is a rehearsal there: that it goes
            through is not reported as passed.
        is_rehearsed: Whether it runs at all on a CPU.
    """

    name: str
    proves: str
    run: Callable[[Request], Outcome]
    least_ranks: int = 1
    only_cuda: bool = False
    is_rehearsed: bool = True
