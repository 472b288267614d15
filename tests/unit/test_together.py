"""Collectives that are put off to the end of a context: what is one with what, and when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from megatron_fsdp_v2.comm.errors import Label
from megatron_fsdp_v2.comm.interface import Axis, Collective, CollectiveKind, CommStream
from megatron_fsdp_v2.comm.together import Labeled, Together

GATHER, SUM, EXCHANGE = (
    CollectiveKind.ALL_GATHER,
    CollectiveKind.REDUCE_SCATTER,
    CollectiveKind.ALL_TO_ALL,
)
ONE: Any = Axis("one", 2, 0)  # type: ignore[arg-type]
OTHER: Any = Axis("other", 2, 0)  # type: ignore[arg-type]


class Issued:
    """What was issued, in words, and works that note who waits."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.together = Together(self._issue)

    def _issue(self, labeled: Sequence[Labeled]) -> list[Any]:
        names = [each.label.name for each in labeled]
        self.log.append("+".join(names))
        return [_Work(self.log, name) for name in names]

    def put_off(
        self,
        name: str,
        kind: CollectiveKind = GATHER,
        axis: Any = ONE,
        dtype: torch.dtype = torch.float32,
    ) -> Any:
        """One more."""
        tensor = torch.zeros(4, dtype=dtype)
        collective = Collective(kind, tensor, tensor, axis, CommStream.GATHER)
        return self.together.put_off(collective, Label(name))


class _Work:
    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name

    def wait(self) -> None:
        self._log.append(f"wait {self._name}")


def test_what_is_alike_is_one_collective_in_the_order_of_the_first_of_each() -> None:
    issued = Issued()
    with issued.together():
        works = [
            issued.put_off("a"),
            issued.put_off("b", SUM),
            issued.put_off("c"),
            issued.put_off("d", axis=OTHER),
            issued.put_off("e", dtype=torch.bfloat16),
            issued.put_off("f", SUM),
            # Exchanges have lengths of their own.
            issued.put_off("g", EXCHANGE),
            issued.put_off("h", EXCHANGE),
        ]
        assert issued.log == []
    assert issued.log == ["a+c", "b+f", "d", "e", "g", "h"]
    works[2].wait()
    assert issued.log[-1] == "wait c"
    assert not issued.together.is_open


def test_what_is_waited_for_inside_is_issued_with_what_came_before_it() -> None:
    issued = Issued()
    with issued.together():
        first = issued.put_off("a")
        issued.put_off("b")
        first.wait()
        issued.put_off("c")
    assert issued.log == ["a+b", "wait a", "c"]


def test_an_inner_context_is_part_of_the_outer_one() -> None:
    issued = Issued()
    with issued.together():
        issued.put_off("a")
        with issued.together():
            issued.put_off("b")
        assert issued.log == []
    assert issued.log == ["a+b"]


def test_what_an_exception_leaves_behind_is_not_issued_and_not_waited_for() -> None:
    issued = Issued()
    with pytest.raises(ValueError, match="planned"), issued.together():
        left = issued.put_off("a")
        raise ValueError("planned")
    left.wait()
    with issued.together():
        issued.put_off("b")
    assert issued.log == ["b"]
