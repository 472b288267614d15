"""Descriptions of command lines for plans, from one process without a process group."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from typing import Any

from tests.mcore.command_line import call_in_process

Calls = Mapping[str, tuple[Sequence[str], int]]


def described(calls: Calls) -> dict[str, Any]:
    """Describe flags for a number of ranks each. Values are descriptions or error messages."""
    answers = call_in_process(_describe_each, list(calls.values()))
    return dict(zip(calls, answers, strict=True))


def _describe_each(calls: Sequence[tuple[Sequence[str], int]]) -> list[Any]:
    return [_described(*call) for call in calls]


def _described(flags: Sequence[str], num_ranks: int) -> Any:
    from megatron_fsdp_v2.plan.sources import FlagsError
    from megatron_fsdp_v2_mcore.plan.source import describe

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return describe(flags, num_ranks)
    except FlagsError as error:
        return str(error)
    except SystemExit as leaving:
        return f"{leaving.code} {said.getvalue()}"
