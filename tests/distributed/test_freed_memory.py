"""No memory is given back, or moved, while a collective that is under way uses it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp_v2.comm import backends
from megatron_fsdp_v2.params.weights import GroupWeights
from megatron_fsdp_v2.runtime.reduction_queue import ReductionQueue
from tests.cases import quick_only
from tests.distributed.freed_memory import OPTIONS, RANKS, SETTINGS, WIDTH, cases, made, train
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import STRATEGIES
from tests.processes import ran
from tests.ranks import RankPools
from tests.reference.failing import fail_when_it_comes_back, failing

ZERO_3 = STRATEGIES[-1]
_CALLS = ("all_gather_single", "all_gather_into_tensor", "broadcast")
_CALLS += ("all_to_all_single", "all_reduce")


class InUse(AssertionError):
    """Memory of a collective under way was given back, or moved."""


class _Watched:
    """Work of torch's that tells when it was waited for."""

    def __init__(self, work: Any, operands: Sequence[torch.Tensor], used: Counter[int]) -> None:
        self._work = work
        self._used = used
        # gloo has the addresses; nothing is held here, or who counts references would see it.
        self._tensors = [(tensor, tensor.data_ptr()) for tensor in operands]
        self._keys = [tensor.untyped_storage()._cdata for tensor in operands]
        used.update(self._keys)

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self) -> None:
        self._work.wait()
        self._used.subtract(self._keys)
        moved = [tensor.shape for tensor, place in self._tensors if tensor.data_ptr() != place]
        self._keys, self._tensors = [], []
        if moved:
            raise InUse(f"tensors of {moved} are somewhere else")


@contextlib.contextmanager
def watched() -> Iterator[Counter[str]]:
    """Have memory stay where it is while a collective uses it; count what is issued and freed.

    Raises:
        InUse: It does not stay.
    """
    used: Counter[int] = Counter()
    seen: Counter[str] = Counter()
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, nbytes: int) -> Any:
        seen["freed"] += nbytes == 0
        if used[storage._cdata] > 0:
            raise InUse(f"{storage.nbytes()} bytes become {nbytes}")
        return resize(storage, nbytes)

    def noted(call: Callable[..., Any]) -> Callable[..., Any]:
        def issue(*operands: Any, **options: Any) -> Any:
            work = call(*operands, **options)
            if not options.get("async_op"):
                return work
            seen["issued"] += 1
            # Some are given as lists, and among them are sizes.
            listed = [each for one in operands for each in (one if type(one) is list else [one])]
            return _Watched(work, [t for t in listed if isinstance(t, torch.Tensor)], used)

        return issue

    with contextlib.ExitStack() as stack:
        put = stack.enter_context
        put(mock.patch.object(torch.UntypedStorage, "resize_", resized))
        for name in filter(dist.__dict__.get, _CALLS):
            put(mock.patch.object(dist, name, noted(getattr(dist, name))))
        several = noted(backends.all_gather_several)
        put(mock.patch.object(backends, "all_gather_several", several))
        yield seen
        assert not +used, "a collective was never waited for"


_QUICK = ("pool and buckets", "ahead")


@on_ranks(
    2,
    strategy=STRATEGIES,
    name=quick_only(OPTIONS, *_QUICK),
)
def test_memory_stays_where_it_is_while_a_collective_uses_it(strategy: str, name: str) -> None:
    with watched() as seen:
        train(name, strategy, OPTIONS[name])
    assert seen["issued"] > 3
    assert seen["freed"] > 3


@pytest.mark.functional
@on_ranks(4, name=[name for name in cases() if "HSDP" in name or "HFSDP" in name])
def test_it_does_along_two_axes(name: str) -> None:
    with watched() as seen:
        train(name, *cases()[name])
    assert seen["issued"] > 3


@on_ranks(2, strategy=STRATEGIES[1:])
def test_it_does_while_every_rank_broadcasts_its_shard(strategy: str) -> None:
    with mock.patch.object(backends, "BROADCAST_BYTES", 1), watched() as seen:
        train("ahead", strategy, OPTIONS["ahead"])
    assert seen["issued"] > 6
    assert seen["freed"] > 3


@on_ranks(2, strategy=["optim_grads", "optim_grads_params"])
def test_it_does_where_a_backward_fails(strategy: str) -> None:
    model, _ = made("", strategy, {"max_live_grad_buffers": 4})
    with watched() as seen:
        with failing(model[0].register_forward_hook(fail_when_it_comes_back)):
            model(torch.ones(2, WIDTH)).sum().backward()
        model(torch.ones(2, WIDTH)).sum().backward()
        model.zero_grad()
    assert seen["issued"] > 3


def _end_before_waiting(queue: ReductionQueue, done: Sequence[Any]) -> None:
    for reduction in done:
        reduction.group.end_inner()
        reduction.work.wait()


def _wait_for_nothing(weights: GroupWeights) -> bool:
    is_under_way = weights.is_gathering
    weights._gathering = None
    return is_under_way


MISTAKES: dict[str, Any] = {
    "gradients": (ReductionQueue, "finish_inner", _end_before_waiting),
    "weights": (GroupWeights, "wait", _wait_for_nothing),
}


@on_ranks(2, kind=MISTAKES)
def test_memory_given_back_too_early_is_found(kind: str) -> None:
    model, _ = made("", "optim_grads_params", {})
    # The forward that ends in the mistake, and a backward.
    with mock.patch.object(*MISTAKES[kind]), pytest.raises(InUse), watched():
        model(torch.ones(2, WIDTH)).sum().backward()


@pytest.mark.functional
def test_trainings_are_bit_by_bit_the_same_where_freed_memory_is_gone(
    pools: RankPools, tmp_path: Path
) -> None:
    path, names = tmp_path / "found.json", [name for name in cases() if name.startswith(ZERO_3)]
    done = ran(
        *(sys.executable, "-X", "faulthandler", "-m", "tests.distributed.freed_memory"),
        *(path, *names),
        env=os.environ | SETTINGS,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(path.read_text()) == pools(RANKS).run(_digests, names, timeout_s=200)


def _digests(names: Sequence[str]) -> dict[str, str]:
    return {name: train(name, *cases()[name]) for name in names}
