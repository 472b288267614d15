"""A module that computes on a stream of its own beside the compute stream has no race.

Megatron does so with its shared expert. A wait that such a module leaves out is found.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_fsdp_v2 import MixedPrecisionPolicy
from tests.cases import quick_only
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import BF16, STRATEGIES, on_mesh, train_own, wrap
from tests.reference.models import WIDTH, Stack
from tests.stream_safety import Fault, record_streams

COPY = "aten.copy_.default"
POLICIES = {"fp32": MixedPrecisionPolicy(), "bf16": BF16}


class Overlapping(nn.Module):
    """Two branches of one unit, the second one on a stream of its own.

    Attributes:
        streams: A recording, or None for one stream.
        side: Its stream for the second branch.
        starts: Whether that waits for the compute stream first.
        joins: Whether the compute stream waits for it in the end.
    """

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.streams: Any = None
        self.side: Any = None
        self.starts = self.joins = True
        self.routed = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.down = nn.Linear(2 * WIDTH + 1, WIDTH)
        # One weight with a gradient from either stream.
        self.gate = self.routed if tied else nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self._on_side():
            shared = self.down(torch.tanh(self.up(x))) * torch.sigmoid(self.gate(x))
        routed = torch.tanh(self.routed(x))
        if self.streams is not None and self.joins:
            self.streams.current_stream().wait_stream(self.side)
        return x + routed + shared

    @contextlib.contextmanager
    def _on_side(self) -> Iterator[None]:
        if self.streams is None:
            yield
            return
        if self.starts:
            self.side.wait_stream(self.streams.current_stream())
        with self.streams.use(self.side):
            yield


class Overlapped(Stack):
    """Blocks with a branch on another stream.

    Attributes:
        recomputed: Whether blocks are recomputed in the backward.
        whole: Whether the second block is on the other stream altogether.
    """

    def __init__(
        self, *, tied: bool = False, recomputed: bool = False, whole: bool = False
    ) -> None:
        super().__init__(block=lambda _: Overlapping(tied=tied))
        self.recomputed = recomputed
        self.whole = whole

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            if number == 1 and self.whole:
                with block._on_side():
                    x = block(x)
                if block.streams is not None:
                    block.streams.current_stream().wait_stream(block.side)
            else:
                x = checkpoint(block, x, use_reentrant=False) if self.recomputed else block(x)
        return x

    def record(self, recording: Any, **options: bool) -> None:
        side = recording.new_stream("side")
        for block in self.blocks:
            block.streams, block.side = recording, side
            for name, value in options.items():
                setattr(block, name, value)


def _sharded(
    mesh_name: str = "2",
    strategy: str = STRATEGIES[-1],
    precision: str = "fp32",
    own: Any = (),
    **options: Any,
) -> Any:
    """A model of which `own` are arguments, and `options` those of its units."""
    torch.manual_seed(0)
    options = {"sharding_strategy": strategy, "mp_policy": POLICIES[precision], **options}
    return wrap(Overlapped(**dict(own)), **on_mesh(mesh_name), **options)


QUICK = ("no_shard", "optim_grads_params", "bf16", "tied", "trace pool", "recomputed", "whole unit")
CASES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    **{strategy: (("2", strategy), {}) for strategy in STRATEGIES},
    "bf16": (("2", STRATEGIES[-1], "bf16"), {}),
    "hsdp": (("HSDP 2x2", STRATEGIES[-1], "bf16"), {}),
    "tied": (("2",), {"own": {"tied": True}}),
    "tied, collected": (("2", STRATEGIES[1]), {"own": {"tied": True}}),
    "recomputed": (("2",), {"own": {"recomputed": True}}),
    "whole unit": (("2",), {"own": {"whole": True}}),
    "trace pool": (("2",), {"enable_trace_pool": True}),
    "waiting": (("2",), {"enable_async_reduce_grad": False}),
}


@on_ranks(lambda name: 4 if name == "hsdp" else 2, name=quick_only(CASES, *QUICK))
def test_gradients_of_a_side_stream_are_reduced_after_they_arrived(name: str) -> None:
    """Nothing is out of order, gradients are on the side, and weights right."""
    case, options = CASES[name]
    plain = train_own(_sharded(*case, **options), num_micro=2)
    model = _sharded(*case, **options)
    with record_streams(model) as recording:
        model.record(recording)
        found = train_own(model, num_micro=2)
    on_side: Counter[str] = Counter()
    for op in recording.schedule.operations("side"):
        for region in op.writes:
            is_gradient = region.buffer.name.endswith("grads full") or op.name == COPY
            on_side["gradients" if is_gradient else op.name] += 1
    pairs = zip(plain, found, strict=True)
    error = max(float((a - b).norm() / (a.norm() + 1e-3)) for a, b in pairs)
    assert [str(violation) for violation in recording.violations()] == []
    # Weights and biases of two layers of three blocks, in four backwards.
    assert on_side["gradients"] >= 4 * 3 * 4
    assert on_side["aten.tanh_backward.default"] >= 4 * 3
    assert error < (2e-2 if "bf16" in case else 1e-5)


def violations_of(**options: bool) -> list[Any]:
    """What is found of the second block's weights where a module leaves a wait out."""
    model = _sharded()
    with record_streams(model) as recording:
        model.record(recording, **options)
        train_own(model, num_micro=2)
    return [v for v in recording.violations() if v.buffer.name == "blocks.1/0 weights gathered"]


@on_ranks(2)
def test_a_side_stream_that_does_not_wait_for_the_gather_is_found() -> None:
    texts = map(str, violations_of(starts=False))
    assert any("all_gather on 'gather'" in t and "on 'side' (reads it)" in t for t in texts)


@on_ranks(2)
def test_a_side_stream_that_still_reads_weights_when_they_go_is_found() -> None:
    found = [v for v in violations_of(joins=False) if v.fault is Fault.PREMATURE_FREE]
    assert any("on 'side' (reads it), then" in str(v) for v in found)
