"""How much is gathered ahead and reduced at a time, set on Megatron's command line."""

from __future__ import annotations

from typing import Any

from megatron_fsdp_v2.runtime.fsdp_module import named_units
from tests.mcore.flags import OVERLAP, fsdp
from tests.mcore.trained import assert_equal, trained
from tests.ranks import RankPools

AFTER_STEP = "--fsdp-unshard-after-step"
KNOBS = f"--fsdp-unshard-prefetch-depth 2 --fsdp-max-live-grad-buffers 3 {AFTER_STEP}"
BYTES = "--fsdp-unshard-prefetch-bytes 1MiB"
SUGGESTED = "--suggested-communication-unit-size 100001"
BUCKETS = "--fsdp-bucket-bytes 1MiB"
DOUBLE = "--fsdp-double-buffer --fsdp-db-use-persist-buf-on-alloc-fail"
REGISTERED = "--use-nccl-ub --disable-symmetric-registration"
POOLED = f"{REGISTERED} --fsdp-trace-pool"


Told = tuple[int | None, int | None, int, int, int]


def _knobs(chunks: Any, optimizer: Any) -> Told:
    """What the shared context of the units was told, and how many the last step gathered."""
    del optimizer
    units = [unit for _, unit in named_units(chunks[0].module)]
    context, gathered = units[0].context, sum(unit.is_gathered_after_step for unit in units)
    limit = context.gathers.limit
    reductions = context.reductions
    assert reductions.bucket_nbytes == limit.bucket_nbytes
    bytes_of = limit.nbytes, reductions.max_live_grad_buffers, limit.bucket_nbytes
    return limit.units, *bytes_of, gathered


def test_the_knobs_reach_the_units_and_change_no_loss(megatron: RankPools) -> None:
    common = ["--global-batch-size 8 --train-iters 3", fsdp(), OVERLAP]
    plain = trained(megatron, 2, *common, probe=_knobs)
    assert plain.extras[0] == (1, None, 2, 0, 0)
    told: dict[str, Told] = {
        # The root, and the units that are gathered ahead of it.
        KNOBS: (2, None, 3, 0, 3),
        BYTES: (None, 1 << 20, 2, 0, 0),
        # Half of the elements, of four bytes each.
        SUGGESTED: (None, 200_000, 2, 0, 0),
        BUCKETS: (1, None, 2, 1 << 20, 0),
    }
    for flags in (*told, DOUBLE, REGISTERED, POOLED):
        found = trained(megatron, 2, *common, flags, probe=_knobs)
        assert_equal(found, plain)
        assert found.extras[0] == told.get(flags, (1, None, 2, 0, 0))
