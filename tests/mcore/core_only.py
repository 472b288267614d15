"""Functions for the ranks of a pool in which `megatron.training` cannot be imported."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from tests.mcore.flags import LOCAL

_STACK = contextlib.ExitStack()


def enter() -> Any:
    """Start a rehearsal without `megatron.training` on this rank; return the example."""
    example = start_permanent_rehearsal()
    multiprocessing.current_process().daemon = False
    torch.manual_seed(1)
    return example


def start_permanent_rehearsal() -> Any:
    """Start a permanent rehearsal in this process and those forked from it."""
    if "examples.megatron_core_loop" not in sys.modules:
        assert not [name for name in sys.modules if name.startswith("megatron")]
        # Python cannot import a module that is None.
        sys.modules["megatron.training"] = None  # type: ignore[assignment]
        from megatron_cpu_rehearsal import rehearse

        _STACK.enter_context(rehearse(LOCAL, into_parser=True))
    from examples import megatron_core_loop

    return megatron_core_loop


@contextlib.contextmanager
def clean() -> Iterator[None]:
    """Reset Megatron's global state at the end, also after an exception."""
    from megatron.core import parallel_state

    import megatron_fsdp_v2_mcore
    from megatron_fsdp_v2_mcore.prove.session import end_groups

    try:
        yield
    finally:
        megatron_fsdp_v2_mcore.uninstall()
        end_groups(parallel_state)
    blocked = [name for name in sys.modules if name.startswith("megatron.training")]
    assert blocked == ["megatron.training"], blocked
    assert sys.modules["megatron.training"] is None


def train(options: dict[str, Any]) -> list[tuple[float | None, float]]:
    """Run the example on this rank. Collective over the pool."""
    example = enter()
    with clean():
        return example.train(example.Settings(**options))


def changed(name: str, **fields: Any) -> Any:
    """Change fields of one of the example's configurations."""
    example = enter()
    make = getattr(example, name)
    return mock.patch.object(example, name, lambda **options: make(**{**options, **fields}))


def wrapping(*names: str) -> Any:
    """Pass only these process groups to the example's wrapper."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    import megatron_fsdp_v2_mcore

    every = ProcessGroupCollection.use_mpu_process_groups()
    groups = ProcessGroupCollection(**{name: getattr(every, name) for name in names})
    wrap = functools.partial(megatron_fsdp_v2_mcore.FullyShardedDataParallel, pg_collection=groups)
    return mock.patch.object(megatron_fsdp_v2_mcore, "FullyShardedDataParallel", wrap)
