"""What is said where a step cannot be captured in a CUDA graph, and weights after a replay.

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

from megatron_fsdp_v2.dtensor.uneven_dtensor import local_of
from megatron_fsdp_v2.params import main_gradient
from megatron_fsdp_v2.params.formats import register_format
from megatron_fsdp_v2.runtime import context
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import STRATEGIES, batch, listen, said, wrap
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
        mock.patch.object(main_gradient, "is_capturing", lambda device: True),
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


@on_ranks(2, strategy=STRATEGIES[1:])
def test_weights_that_a_replay_has_stepped_are_those_of_the_next_forward(strategy: str) -> None:
    """A replay changes main weights, and neither a hook nor a version counter tells."""
    losses = []
    for is_captured in (False, True):
        model, optimizer = _made(sharding_strategy=strategy)
        _loss(model).backward()
        optimizer.step()
        with _capturing() if is_captured else contextlib.nullcontext():
            optimizer.zero_grad()
            _loss(model).backward()
            optimizer.step()
        with torch.no_grad():
            _loss(model)
            wire = listen(model)
            for param in model.parameters():
                local_of(param).data.mul_(0.5)
            losses.append(float(_loss(model)))
        gathered = wire.count("all_gather")
    plain, captured = losses
    expected = _made(sharding_strategy=strategy)[0]
    expected.load_state_dict(model.state_dict())
    with torch.no_grad():
        right = float(_loss(expected))
    assert captured == right
    assert gathered > 0
    # The same change without a graph is not seen below ZeRO-3: nothing counts it.
    assert (plain == right) == (strategy == STRATEGIES[-1])
