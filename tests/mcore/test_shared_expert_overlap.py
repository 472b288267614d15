"""`--moe-shared-expert-overlap`: the shared expert computes on a stream of its own."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from tests.mcore.session import MODEL_FLAGS, Training, curves, distance, fsdp, train
from tests.ranks import RankPools

_MODEL = """
--num-experts 4 --moe-router-topk 2 --disable-bias-linear --swiglu --moe-ffn-hidden-size 64
--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 --train-iters 4
--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall
--moe-shared-expert-intermediate-size 64 --moe-shared-expert-gate
"""
EP2 = _MODEL.split()
OVERLAP = "--moe-shared-expert-overlap"


def _train(pools: RankPools, *flags: str, probe: Any = None) -> Training:
    result = curves(pools(2).run(train, [*MODEL_FLAGS, *EP2, *flags], probe))
    assert len(result.losses) == len(result.grad_norms) == 4
    return result


def recorded_step(model: Any, optimizer: Any) -> tuple[list[str], list[str]]:
    """Violations of a step on recorded streams, and what the shared experts' stream writes."""
    from megatron.core.transformer.moe import shared_experts, token_dispatcher

    from megatron_fsdp_v2.diagnostics.stream_safety import record_streams
    from megatron_fsdp_v2_mcore.patching import Patches

    del optimizer
    chunk, patches = model[0], Patches()
    experts = [m for m in chunk.modules() if isinstance(m, shared_experts.SharedExpertMLP)]
    assert len(experts) == 2
    renumber, new_use = shared_experts.set_tensor_grad_fn_sequence_sr, torch.cuda.stream
    with record_streams(chunk) as recording:
        side = recording.new_stream("shared expert")

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


def test_it_trains_like_ddp(megatron: RankPools) -> None:
    reference = _train(megatron, OVERLAP)
    result = _train(megatron, *fsdp("optim_grads_params", OVERLAP))
    assert distance(result.losses, reference.losses) < 1e-6
    assert distance(result.grad_norms, reference.grad_norms) < 1e-5


def test_its_gradients_are_reduced_after_they_arrived(megatron: RankPools) -> None:
    flags = ["--overlap-grad-reduce", "--overlap-param-gather"]
    result = _train(megatron, *fsdp("optim_grads_params", OVERLAP, *flags), probe=recorded_step)
    for violations, written in result.extras:
        assert [text for text in violations if "/0 grads" in text or "/0 weights" in text] == []
        assert any("layers.1/0 grads full" in name for name in written)
