"""Models built on the meta device, or differently on every rank, start as Megatron means."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.mcore.session import MODEL_FLAGS, Training, fsdp, train
from tests.ranks import RankPools

ONE_STEP = [*MODEL_FLAGS, "--global-batch-size", "8", "--train-iters", "1", "--lr", "0"]
META = "--init-model-with-meta-device"
EMBEDDING = "embedding.word_embeddings.weight"
POSITIONS = "embedding.position_embeddings.weight"


def _weights(chunks: Any, optimizer: Any) -> dict[str, list[torch.Tensor]]:
    """Every rank's full parameters, where this is rank 0."""
    del optimizer
    mine = {
        name.removeprefix("module."): param.full_tensor()
        for chunk in chunks
        for name, param in chunk.named_parameters()
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    names = {name for one in everyone for name in one}
    return {name: [one[name] for one in everyone if name in one] for name in names}


def _start(pools: RankPools, *flags: str) -> dict[str, list[torch.Tensor]]:
    words = [*ONE_STEP, *fsdp("optim_grads_params", *flags)]
    results: list[Training] = pools(4).run(train, words, _weights)
    weights: dict[str, list[torch.Tensor]] = results[0].extras
    return weights


TENSOR = ("--tensor-model-parallel-size", "2", "--init-method-std", "0.05")


@pytest.fixture(scope="module")
def real(megatron: RankPools) -> dict[str, list[torch.Tensor]]:
    """Weights of the tensor-parallel model, built as Megatron always does."""
    return _start(megatron, *TENSOR)


def test_meta_device_weights_are_drawn_as_the_model_was_configured(
    megatron: RankPools, real: dict[str, list[torch.Tensor]]
) -> None:
    late = _start(megatron, *TENSOR, META)
    assert real.keys() == late.keys()
    for name, copies in late.items():
        # Whatever a rank drew, all ranks hold slices of the same whole.
        assert all(torch.equal(copy, copies[0]) for copy in copies), name
        mean, std = (float(real[name][0].mean()), float(real[name][0].std()))
        assert float(copies[0].mean()) == pytest.approx(mean, abs=0.01), name
        assert float(copies[0].std()) == pytest.approx(std, rel=0.1, abs=1e-6), name
    assert float(late[POSITIONS][0].std()) == pytest.approx(0.05, rel=0.1)


def test_pipeline_stages_start_from_one_embedding_on_the_meta_device(megatron: RankPools) -> None:
    weights = _start(megatron, "--pipeline-model-parallel-size", "2", META)
    first, last = weights[EMBEDDING][0], weights["output_layer.weight"][0]
    assert float(first.std()) == pytest.approx(0.02, rel=0.1)
    assert torch.equal(first, last)


def test_ranks_that_draw_other_weights_start_from_the_first_one(
    megatron: RankPools, real: dict[str, list[torch.Tensor]]
) -> None:
    drawn = _start(megatron, *TENSOR, "--data-parallel-random-init")
    assert drawn.keys() == real.keys()
    for name, copies in drawn.items():
        assert all(torch.equal(copy, real[name][0]) for copy in copies), name
