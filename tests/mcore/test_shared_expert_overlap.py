"""`--moe-shared-expert-overlap`: the shared expert computes on a separate stream."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from tests.mcore.flags import ALLTOALL, EP2, OVERLAP, fsdp
from tests.mcore.trained import trained
from tests.ranks import RankPools

FLAGS = (
    f"{ALLTOALL} {EP2} --moe-shared-expert-intermediate-size 64 --moe-shared-expert-gate "
    "--moe-shared-expert-overlap --train-iters 3 --global-batch-size 8"
)


def recorded_step(model: Any, optimizer: Any) -> tuple[list[str], list[str]]:
    """Return violations on recorded streams, and buffers that the shared experts' stream writes."""
    from megatron.core.transformer.moe import shared_experts, token_dispatcher

    from megatron_fsdp_v2_patching import Patches
    from tests.stream_safety import record_streams

    del optimizer
    chunk, patches = model[0], Patches()
    experts = [m for m in chunk.modules() if isinstance(m, shared_experts.SharedExpertMLP)]
    assert len(experts) == 2
    renumber, new_use = shared_experts.set_tensor_grad_fn_sequence_sr, torch.cuda.stream
    with record_streams(chunk) as recording:
        side = recording.new_compute_stream("shared expert")

        def use(stream: Any) -> Any:
            return recording.use(side) if stream is side else new_use(stream)

        def keep_and_renumber(tensor: Any, number: int) -> None:
            if tensor is not None and tensor.grad_fn is not None:
                recording.keep_stream(tensor.grad_fn)
            renumber(tensor, number)

        patches.set(torch.cuda, "stream", use)
        patches.set(torch.cuda, "current_stream", lambda device=None: recording.current_stream())
        for module in (shared_experts, token_dispatcher):
            if hasattr(module, "set_tensor_grad_fn_sequence_sr"):
                patches.set(module, "set_tensor_grad_fn_sequence_sr", keep_and_renumber)
        with contextlib.ExitStack() as undo:
            undo.callback(patches.undo)
            for expert in experts:
                undo.callback(setattr, expert, "stream", expert.stream)
                expert.stream = side
            for _ in range(2):
                _forward(chunk).sum().backward()
                chunk.finish_grad_sync()
    writes = {r.buffer.name for op in recording.schedule.operations(side.name) for r in op.writes}
    return [str(v) for v in recording.violations()], sorted(writes)


def _forward(chunk: Any) -> Any:
    tokens = torch.arange(64).view(2, 32)
    position = torch.arange(32).expand(2, 32)
    mask = torch.ones(2, 1, 32, 32, dtype=torch.bool).triu(1)
    return chunk(tokens, position, mask, labels=tokens)


@pytest.mark.slow
def test_gradients_of_the_shared_expert_are_reduced_after_they_are_written(
    megatron: RankPools,
) -> None:
    short = "--train-iters 1"
    result = trained(megatron, 2, FLAGS, fsdp(), OVERLAP, short, probe=recorded_step)
    for violations, written in result.extras:
        assert [text for text in violations if "/0 grads" in text or "/0 weights" in text] == []
        assert any("layers.1/0 grads full" in name for name in written)
