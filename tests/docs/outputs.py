"""Functions that produce the outputs shown on pages."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import pytest
import torch

from megatron_fsdp_v2.diagnostics import check_finite
from tests.distributed.test_stream_safety import faults_found
from tests.distributed.test_trace_pool import Deep, _sharded, _step
from tests.reference.models import Stack


def not_finite() -> str:
    """Return the error message for a gradient that contains NaN."""
    model: Any = _sharded(Stack(), enable_trace_pool=False)
    _step(model)
    weight = model.blocks[1].up.weight
    if weight.grad is not None:
        # The first element of this rank's rows.
        weight.grad.to_local().view(-1)[:1] = float("nan")
    with pytest.raises(RuntimeError) as raised:
        check_finite(model)
    return _wrapped(f"RuntimeError: {raised.value}")


def pool_report() -> str:
    """Return the pool report of a model of six equal layers, after training and evaluations."""
    torch.manual_seed(0)
    model: Any = _sharded(Deep(6))
    for _ in range(4):
        _step(model, evaluates=True)
    return model.trace_pool().report()


def violation() -> str:
    """Return the checker's report of gradients that are freed during their reduction."""
    found = faults_found("gradients freed early")
    text = next(text for _, buffer, text in found if buffer.startswith("blocks.1/"))
    # Operations of two threads may be recorded in another order.
    numbers = sorted(set(re.findall(r"#(\d+)", text)), key=int)
    return _wrapped(re.sub(r"#(\d+)", lambda m: f"#{233 + 3 * numbers.index(m[1])}", text))


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)
