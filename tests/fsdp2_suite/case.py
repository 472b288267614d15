"""Base class that replaces torch's test classes: a test runs in an existing process group."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.common_utils import TestCase

from megatron_fsdp_v2.dtensor.uneven_dtensor import UnevenDTensor

BARRIER_S = 5.0
"""Timeout in seconds of the barrier after a case."""

# The barrier uses the store: a collective could pair with one of an unfinished case.
_BARRIERS = itertools.count()


class OutOfStepError(RuntimeError):
    """A case ended on this rank but not on others: the process group is unusable."""


@dataclass(frozen=True)
class Failure:
    """A failure of a test, or of one of its cases.

    Attributes:
        case: The arguments of the case in words; empty if the test has no cases.
        error: The traceback.
    """

    case: str
    error: str


class Case(TestCase):
    """Base class of torch's tests in this suite."""

    rank: int

    @property
    def world_size(self) -> int:
        """Number of ranks of most of torch's tests."""
        return 4

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The existing process group."""
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    def perThreadSetUp(self) -> None:
        """Set up a rank; torch's tests extend this method."""

    def perThreadTearDown(self) -> None:
        """Tear down a rank; torch's tests extend this method."""

    def run_subtests(
        self,
        subtest_config: Mapping[str, Sequence[Any]],
        test_fn: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Run all cases of a test, and continue after a failure."""
        for values in itertools.product(*subtest_config.values()):
            self.num_cases += 1
            if self.num_cases <= self.skipped:
                continue
            chosen = dict(zip(subtest_config, values, strict=True))
            try:
                test_fn(*args, **kwargs, **chosen)
            except Exception:
                self.failures.append(Failure(_in_words(chosen), traceback.format_exc()))
            self._barrier()

    def _barrier(self) -> None:
        """Wait for the other ranks.

        Raises:
            OutOfStepError: Another rank has not finished the case.
        """
        store = dist.distributed_c10d._get_default_store()
        name = f"tests/fsdp2_suite/{next(_BARRIERS)}"
        if store.add(f"{name}/ranks", 1) == dist.get_world_size():
            store.set(f"{name}/all", "")
        try:
            store.wait([f"{name}/all"], timedelta(seconds=BARRIER_S))
        except dist.DistStoreError:
            of = self.failures[-1] if self.failures else Failure("", "nothing failed here")
            raise OutOfStepError(f"case {self.num_cases}: {of.case}\n{of.error}") from None

    def run_here(self, rank: int, skipped: int = 0) -> tuple[int, list[Failure]]:
        """Run the test on this rank.

        Args:
            rank: This rank.
            skipped: Number of cases to skip.

        Returns:
            The number of cases, and the failures.

        Raises:
            OutOfStepError: Another rank has not finished a case.
        """
        self.rank = rank
        self.skipped = skipped
        self.failures: list[Failure] = []
        self.num_cases = 0
        torch._dynamo.reset()
        try:
            if getattr(self, "__unittest_skip__", False):
                self.skipTest(self.__unittest_skip_why__)
            self.setUp()
            self.perThreadSetUp()
            try:
                getattr(self, self._testMethodName)()
            finally:
                self.perThreadTearDown()
                self.tearDown()
        except OutOfStepError:
            raise
        except Exception:
            self.failures.append(Failure("", traceback.format_exc()))
        self._barrier()
        return max(self.num_cases, 1), self.failures


def _in_words(chosen: Mapping[str, Any]) -> str:
    words = []
    for name, value in chosen.items():
        shown = getattr(value, "__name__", None) or repr(value)
        words.append(f"{name}={shown.split(' at 0x')[0]}")
    return ", ".join(words)


def assert_parity(
    case: TestCase,
    replicated: nn.Module,
    sharded: nn.Module,
    prefixes_to_ignore: tuple[str, ...] = (),
) -> None:
    """Compare a sharded model with a replicated one, for any distribution of rows over ranks.

    Args:
        case: The test.
        replicated: The replicated model.
        sharded: The sharded model.
        prefixes_to_ignore: Parts of names that only the sharded model has.
    """
    error = None
    try:
        _compare(case, replicated, sharded, prefixes_to_ignore)
    except AssertionError as found:
        error = str(found)
    # Ranks hold different rows. If one rank fails, all ranks fail: none waits for another rank.
    errors = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    for rank, text in enumerate(errors):
        case.assertIsNone(text, f"rank {rank}: {text}")


def _compare(
    case: TestCase, replicated: nn.Module, sharded: nn.Module, prefixes_to_ignore: tuple[str, ...]
) -> None:
    named = list(sharded.named_parameters())
    for _, param in named:
        case.assertIsInstance(param, UnevenDTensor)
    whole = [param.full_tensor() for _, param in named]
    expected = list(replicated.named_parameters())
    for (name, param), (sharded_name, mine), full in zip(expected, named, whole, strict=True):
        shown = sharded_name
        for prefix in prefixes_to_ignore:
            shown = shown.replace(prefix, "")
        case.assertEqual(name, shown)
        case.assertEqual(full, param.detach())
        if param.grad is None:
            case.assertIsNone(mine.grad)
            continue
        case.assertIsNotNone(mine.grad)
        first, end = mine.local_rows
        case.assertEqual(mine.grad.to_local(), param.grad[first:end])
