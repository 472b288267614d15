"""What is said where a step cannot be captured in a CUDA graph.

Whether a stream captures is asked of a double here: what a captured step queues is checked on fake
CUDA (`test_fake_cuda.py`), and its replays on a GPU (`make test-gpu`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy

from megatron_fsdp_v2.params import gradients
from megatron_fsdp_v2.params.formats import register_format
from megatron_fsdp_v2.runtime import context
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import batch, said, wrap
from tests.reference.models import Skipping, Stack
from tests.reference.scaled_float8 import ScaledFloat8Format, quantize_linears

OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "compared": ({"check_ranks": "always"}, "check_ranks='always' compares on the host"),
    "ahead": ({"enable_unshard_after_step": True}, "enable_unshard_after_step gathers beyond"),
    "pool": ({"enable_trace_pool": True}, "enable_trace_pool plans addresses anew"),
    "offloaded": ({"offload_policy": CPUOffloadPolicy()}, "weights are offloaded"),
    "quantized": ({}, "weights are quantized"),
}


@contextlib.contextmanager
def _capturing() -> Iterator[None]:
    with (
        mock.patch.object(context, "is_capturing", lambda device: True),
        mock.patch.object(gradients, "is_capturing", lambda device: True),
    ):
        yield


def _loss(model: Any) -> torch.Tensor:
    return torch.as_tensor(model(batch(0)).square().mean())


def _made(name: str = "", **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Stack()
    if name == "quantized":
        register_format(ScaledFloat8Format)
        quantize_linears(model)
    wrap(model, **options)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("name", OPTIONS)
@on_ranks(2)
def test_an_option_that_cannot_be_captured_is_rejected_by_name(name: str) -> None:
    options, reason = OPTIONS[name]
    model, optimizer = _made(name, **options)
    _loss(model).backward()
    with _capturing():
        texts = [said(RuntimeError, optimizer.step), said(RuntimeError, lambda: _loss(model))]
    for text in texts:
        assert "the root (Stack) cannot be captured in a CUDA graph: " in text
        assert reason in text
    optimizer.step()
    _loss(model).backward()


@on_ranks(2)
def test_a_part_of_a_pass_is_rejected_by_name() -> None:
    model, _ = _made()
    with _capturing():
        first = said(RuntimeError, lambda: _loss(model))
    loss = _loss(model)
    with _capturing():
        backward = said(RuntimeError, loss.backward)
    handle = model.blocks[0].register_forward_hook(lambda *_: capture.__enter__() and None)
    capture = _capturing()
    forward = said(RuntimeError, lambda: _loss(model))
    capture.__exit__(None, None, None)
    handle.remove()
    _loss(model).backward()
    assert "ranks compare what they sharded at the first use: run a step before" in first
    for text in (backward, forward):
        assert "runs in the capture of a CUDA graph" in text
        assert "began outside it; capture forward and backward together" in text


@on_ranks(2)
def test_a_captured_step_that_leaves_a_parameter_out_is_rejected_by_name() -> None:
    torch.manual_seed(0)
    model: Any = Skipping()
    wrap(model, sharding_strategy="optim_grads")
    model.skip = 1
    _loss(model).backward()
    with _capturing():
        text = said(RuntimeError, lambda: _loss(model).backward())
    assert "had no gradient in a backward captured in a CUDA graph" in text
    model.zero_grad()
    _loss(model).backward()
