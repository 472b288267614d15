"""Models built on the meta device, or differently on every rank, start as Megatron means."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.cases import quick_if
from tests.mcore import flags as f
from tests.mcore.session import enter_rehearsal
from tests.mcore.trained import on_megatron, trained
from tests.ranks import RankPools

ONE_STEP = "--global-batch-size 8 --train-iters 1 --lr 0"
META = "--init-model-with-meta-device"
EMBEDDING = "embedding.word_embeddings.weight"


def _weights(chunks: Any, optimizer: Any) -> dict[str, list[torch.Tensor]]:
    """Every rank's full parameters, where this is rank 0."""
    del optimizer
    mine = {
        (f"{number} " if number else "")
        + name.removeprefix("module."): param.detach().full_tensor()
        for number, chunk in enumerate(chunks)
        for name, param in chunk.named_parameters()
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    names = {name for one in everyone for name in one}
    return {name: [one[name] for one in everyone if name in one] for name in names}


def _start(pools: RankPools, *flags: str) -> dict[str, list[torch.Tensor]]:
    weights: dict[str, list[torch.Tensor]]
    weights, *_ = trained(pools, 4, ONE_STEP, f.fsdp(), *flags, probe=_weights).extras
    return weights


TENSOR = f"{f.TP2} --init-method-std 0.05"


@pytest.fixture(scope="module")
def real(megatron: RankPools) -> dict[str, list[torch.Tensor]]:
    """Weights of the tensor-parallel model, built as Megatron always does."""
    return _start(megatron, TENSOR)


MOE = f"{f.ALLTOALL} --moe-grouped-gemm"
GATE = "--moe-shared-expert-intermediate-size 64 --moe-shared-expert-gate"
BUILT: dict[str, str] = {
    "at-once": f"{MOE} {f.EP2} {TENSOR} --sequence-parallel {f.UNTIED} --bf16",
    "plain": "",
    "tensor": TENSOR,
    "pipeline-untied-swiglu": f"{f.PP2} {f.UNTIED} --swiglu",
    "pipeline-tied": f.PP2,
    "experts-fp32": f"{MOE} {f.EP2}",
    "virtual-stages": f"{MOE} {f.VPP2}",
    "shared-expert-gate": f"{MOE} {GATE} --bf16",
}


@pytest.mark.parametrize(
    "flags", [quick_if(name == "shared-expert-gate", BUILT[name], id=name) for name in BUILT]
)
def test_a_model_built_on_the_meta_device_starts_from_the_same_weights(
    megatron: RankPools, flags: str
) -> None:
    """To the bit, and what is drawn after them is the same too: dropout shows in the loss."""
    batch = "--global-batch-size 16" if "pipeline" in flags else ""
    words = [ONE_STEP, f.fsdp(), flags, "--hidden-dropout 0.1", batch]
    real, late = (trained(megatron, 4, *words, meta, probe=_weights) for meta in ("", META))
    assert real.extras[0].keys() == late.extras[0].keys()
    for name, copies in late.extras[0].items():
        # Whatever a rank drew, all ranks hold slices of the same whole.
        for copy, expected in zip(copies, real.extras[0][name], strict=True):
            assert torch.equal(copy, expected), name
    assert real.losses == late.losses


def _lines_at_start(device: str) -> list[str]:
    """What is logged for a layer that calls itself one of Transformer Engine's."""
    enter_rehearsal()
    from megatron_fsdp_v2_mcore.model import initialize

    kind = type("Linear", (torch.nn.Linear,), {"__module__": "transformer_engine.pytorch"})
    with torch.device(device):
        chunk = torch.nn.Sequential(kind(4, 4))
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    level = initialize._logger.level
    initialize._logger.addHandler(handler)
    # Rehearsals in tests are quiet.
    initialize._logger.setLevel(logging.WARNING)
    try:
        initialize.initializer(SimpleNamespace(), chunk)
    finally:
        initialize._logger.setLevel(level)
        initialize._logger.removeHandler(handler)
    return lines


@on_megatron(2)
def test_where_weights_may_start_otherwise_one_line_says_so() -> None:
    """On the first rank alone."""
    lines = _lines_at_start("meta")
    assert len(lines) == (dist.get_rank() == 0)
    assert all("start from other values than without the flag" in line for line in lines)
    assert _lines_at_start("cpu") == []


def test_pipeline_stages_start_from_one_embedding_on_the_meta_device(megatron: RankPools) -> None:
    weights = _start(megatron, f.PP2, META)
    first, last = weights[EMBEDDING][0], weights["output_layer.weight"][0]
    assert float(first.std()) == pytest.approx(0.02, rel=0.1)
    assert torch.equal(first, last)


def test_ranks_that_draw_other_weights_start_from_the_first_one(
    megatron: RankPools, real: dict[str, list[torch.Tensor]]
) -> None:
    drawn = _start(megatron, TENSOR, "--data-parallel-random-init")
    assert drawn.keys() == real.keys()
    for name, copies in drawn.items():
        assert all(torch.equal(copy, real[name][0]) for copy in copies), name
