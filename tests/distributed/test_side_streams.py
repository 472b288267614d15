"""A module that computes on a stream of its own beside the compute stream has no race.

Megatron does so with its shared expert. A wait that such a module leaves out is found.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_fsdp_v2 import MixedPrecisionPolicy
from megatron_fsdp_v2.diagnostics.stream_safety import Fault, record_streams
from tests.distributed.wrapping import BF16, STRATEGIES, batch, mesh_of, wrap
from tests.ranks import RankPools
from tests.reference.models import WIDTH, Stack

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
        super().__init__()
        self.blocks = nn.ModuleList(Overlapping(tied=tied) for _ in range(3))
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


def _sharded(shape: tuple[int, ...], strategy: str, precision: str = "fp32", **options: Any) -> Any:
    own = {name: options.pop(name) for name in ("tied", "recomputed", "whole") if name in options}
    torch.manual_seed(0)
    return wrap(
        Overlapped(**own),
        mesh=mesh_of(*shape),
        sharding_strategy=strategy,
        mp_policy=POLICIES[precision],
        **options,
    )


def _steps(model: Any, num_steps: int = 2) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    for step in range(num_steps):
        optimizer.zero_grad()
        for micro in range(2):
            with model.no_sync() if micro == 0 else contextlib.nullcontext():
                model(batch(torch.distributed.get_rank(), step)).float().square().mean().backward()
        optimizer.step()
    return [param.to_local().detach().clone() for param in model.parameters()]


def recorded(*case: Any, **options: Any) -> tuple[list[str], dict[str, int], float]:
    """Violations, operations on the side by what they are, distance of the weights."""
    plain = _steps(_sharded(*case, **options))
    model = _sharded(*case, **options)
    with record_streams(model) as recording:
        model.record(recording)
        found = _steps(model)
    on_side: dict[str, int] = {}
    for op in recording.schedule.operations("side"):
        for region in op.writes:
            is_gradient = region.buffer.name.endswith("grads full") or op.name == COPY
            name = "gradients" if is_gradient else op.name
            on_side[name] = on_side.get(name, 0) + 1
    error = max(
        float((a - b).norm() / (a.norm() + 1e-3)) for a, b in zip(plain, found, strict=True)
    )
    return [str(violation) for violation in recording.violations()], on_side, error


QUICK = ("no_shard", "optim_grads_params", "bf16", "tied", "trace pool", "recomputed", "whole unit")
CASES = {
    **{strategy: (((2,), strategy), {}) for strategy in STRATEGIES},
    "bf16": (((2,), STRATEGIES[-1], "bf16"), {}),
    "hsdp": (((2, 2), STRATEGIES[-1], "bf16"), {}),
    "tied": (((2,), STRATEGIES[-1]), {"tied": True}),
    "tied, collected": (((2,), STRATEGIES[1]), {"tied": True}),
    "recomputed": (((2,), STRATEGIES[-1]), {"recomputed": True}),
    "whole unit": (((2,), STRATEGIES[-1]), {"whole": True}),
    "trace pool": (((2,), STRATEGIES[-1]), {"enable_trace_pool": True}),
    "waiting": (((2,), STRATEGIES[-1]), {"enable_async_reduce_grad": False}),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.functional]) for n in CASES],
)
def test_gradients_of_a_side_stream_are_reduced_after_they_arrived(
    pools: RankPools, name: str
) -> None:
    case, options = CASES[name]
    ranks = pools(len(case[0]) * 2)
    for violations, on_side, error in ranks.run(recorded, *case, **options):
        assert violations == []
        # Weights and biases of two layers of three blocks, in four backwards.
        assert on_side["gradients"] >= 4 * 3 * 4
        assert on_side["aten.tanh_backward.default"] >= 4 * 3
        assert error < (2e-2 if "bf16" in case else 1e-5)


def faults_of(**options: bool) -> list[tuple[str, str, str]]:
    """What is found where a module leaves a wait out: fault, buffer, explanation."""
    model = _sharded((2,), STRATEGIES[-1])
    with record_streams(model) as recording:
        model.record(recording, **options)
        _steps(model)
    return [(v.fault.value, v.buffer.name, str(v)) for v in recording.violations()]


def test_a_side_stream_that_does_not_wait_for_the_gather_is_found(pools: RankPools) -> None:
    for found in pools(2).run(faults_of, starts=False):
        texts = [text for _, name, text in found if name == "blocks.1/0 weights gathered"]
        assert any(
            "all_gather on 'gather'" in text and "on 'side' (reads it)" in text for text in texts
        )


def test_a_side_stream_that_still_reads_weights_when_they_go_is_found(pools: RankPools) -> None:
    for found in pools(2).run(faults_of, joins=False):
        assert any(
            (fault, name) == (Fault.PREMATURE_FREE.value, "blocks.1/0 weights gathered")
            and "on 'side' (reads it), then" in text
            for fault, name, text in found
        )
