"""Trainings whose scalars are caught where Megatron hands them to TensorBoard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

from tests.mcore import session

Scalars = dict[tuple[str, int], float]


class Recorder:
    """Stands where a `SummaryWriter` stands, and remembers numbers."""

    def __init__(self) -> None:
        self.scalars: Scalars = {}

    def add_scalar(self, name: str, value: Any, iteration: int) -> None:
        self.scalars[name, iteration] = float(value)

    def add_text(self, *args: Any, **kwargs: Any) -> None:
        """Arguments are no scalars."""

    def flush(self) -> None:
        """Nothing is kept back."""


def train_recorded(flags: Sequence[str], probe: Any = None) -> tuple[session.Training, Scalars]:
    """Run one training on this rank.

    Returns:
        What `session.train` returns, and scalars by name and iteration, on the last rank.
    """
    session.enter_rehearsal()
    from megatron.training import global_vars as variables

    recorder = Recorder()

    def set_writer(args: Any) -> None:
        if args.rank == args.world_size - 1:
            variables._GLOBAL_TENSORBOARD_WRITER = recorder

    with (
        mock.patch.object(variables, "_set_tensorboard_writer", set_writer),
        mock.patch.object(variables, "_GLOBAL_TENSORBOARD_WRITER", None),
    ):
        return session.train(flags, probe), recorder.scalars


def scalars_of(results: Sequence[tuple[session.Training, Scalars]]) -> Scalars:
    """What the one rank with a writer has recorded."""
    found = [scalars for _, scalars in results if scalars]
    assert len(found) == 1
    return found[0]
