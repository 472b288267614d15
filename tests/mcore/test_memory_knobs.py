"""Prefetch depth and gradient buffers, set on Megatron's command line."""

from __future__ import annotations

from typing import Any

from megatron_fsdp_v2.runtime.fsdp_module import named_units
from tests.mcore.session import MODEL_FLAGS, fsdp, train
from tests.ranks import RankPools

FLAGS = [*MODEL_FLAGS, "--global-batch-size", "8", "--train-iters", "3"]
OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")
DOUBLE = ("--fsdp-double-buffer", "--fsdp-db-use-persist-buf-on-alloc-fail")
REGISTERED = ("--use-nccl-ub", "--disable-symmetric-registration")
KNOBS = ("--fsdp-unshard-prefetch-depth", "2", "--fsdp-max-live-grad-buffers", "3")


def _knobs(chunks: Any, optimizer: Any) -> tuple[int, int]:
    """What the shared context of the units was told."""
    del optimizer
    context = named_units(chunks[0].module)[0][1].context
    return context.options.prefetch_depth, context.reductions.max_live_grad_buffers


def test_the_knobs_reach_the_units_and_change_no_loss(megatron: RankPools) -> None:
    found = []
    for knobs in ((), KNOBS, DOUBLE, REGISTERED, (*REGISTERED, "--fsdp-trace-pool")):
        words = [*FLAGS, *fsdp("optim_grads_params", *OVERLAP, *knobs)]
        first, *_ = megatron(2).run(train, words, _knobs)
        found.append((first.losses, first.grad_norms, first.extras))
    assert [losses_and_norms for *losses_and_norms, _ in found] == [list(found[0][:2])] * 5
    assert [knobs for *_, knobs in found] == [(1, 2), (2, 3), *[(1, 2)] * 3]
