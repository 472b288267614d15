"""Import of unmodified files of PyTorch's FSDP2 tests with substituted functions and classes.

While a file is imported and run, `torch.distributed.fsdp.fully_shard` is the function under test.
A class that runs in an existing process group replaces torch's test classes, which start a process
or a thread per rank. Checks for GPUs are disabled.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed._composable
import torch.distributed.fsdp
from torch.testing._internal import common_distributed, common_fsdp, common_utils

from megatron_fsdp_v2 import fully_shard, register_fsdp_forward_method
from tests.fsdp2_suite.case import Case, assert_parity

MOST_RANKS = 4
"""Number of devices reported to the tests; several tests use it as their world size."""

OURS, TORCHS = "ours", "torch"
"""The `fully_shard` under test. Torch's own shows which tests can pass on a CPU."""


def _unchanged(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    """Return a decorator without effect."""
    return lambda function: function


def _replicate(*args: Any, **kwargs: Any) -> Any:
    """Call torch's `replicate` for a module on a CPU."""
    kwargs.pop("device_ids", None)
    return _REPLICATE(*args, **kwargs)


_REPLICATE = torch.distributed._composable.replicate


@contextlib.contextmanager
def substituted(whose: str) -> Iterator[None]:
    """Replace functions and classes in torch's modules inside the context."""
    replaced: list[tuple[Any, str, Any]] = [
        (common_fsdp, "FSDPTest", Case),
        (common_fsdp, "FSDPTestMultiThread", Case),
        # The original runs a test a second time with parts compiled for a GPU.
        (common_fsdp, "compiled_fsdp_test", _unchanged),
        (common_distributed, "skip_if_lt_x_gpu", _unchanged),
        (torch.distributed._composable, "replicate", _replicate),
        (torch.cpu, "device_count", lambda: MOST_RANKS),
        (torch.cpu, "_sleep", lambda cycles: None),
        (torch.cpu.Stream, "record_event", lambda stream, event=None: None),
        (common_utils, "get_cycles_per_ms", lambda: 1.0),
    ]
    if whose == OURS:
        replaced += [
            (torch.distributed.fsdp, "fully_shard", fully_shard),
            (torch.distributed.fsdp, "register_fsdp_forward_method", register_fsdp_forward_method),
            (common_fsdp, "check_sharded_parity", assert_parity),
        ]
    with contextlib.ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value, create=True))
        yield


def load(path: Path, whose: str) -> ModuleType:
    """Import a file of tests, once per `fully_shard` under test."""
    name = f"fsdp2_suite_{whose}_{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        with substituted(whose):
            spec.loader.exec_module(module)
        sys.modules[name] = module
    return sys.modules[name]
