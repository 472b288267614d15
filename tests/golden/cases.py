"""The trainings that have a golden record."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from megatron_fsdp_v2.params.formats import register_format
from tests.distributed.test_weight_formats import Layers
from tests.distributed.wrapping import BF16, MESHES, STRATEGIES, strategies_on
from tests.parity.patterns import PATTERNS
from tests.reference import models
from tests.reference.scaled_float8 import ScaledFloat8Format, quantize_linears
from tests.reference.two_way import TwoWayFormat

FULL = STRATEGIES[-1]
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Relative tolerance of losses by dtype of the weights, for machines with other kernels."""


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        file: Name of the file that holds the record.
        label: The pattern or the feature under test.
        strategy: Sharding strategy along the inner axis.
        mesh: One of `MESHES`.
        pattern: One of `PATTERNS`.
        build: Builds the model to shard; None selects the model of the pattern.
        units: Returns the modules to shard before the root; None selects the units of the pattern.
        plain_dtype: Dtype of the weights in the training without sharding.
        options: Further arguments of `fully_shard`.
        has_streams: Whether collectives are issued on streams, as on CUDA.
    """

    file: str
    label: str
    strategy: str
    mesh: str
    pattern: str = "plain"
    build: Callable[[], nn.Module] | None = None
    units: Callable[[Any], list[Any]] | None = None
    plain_dtype: torch.dtype = torch.float32
    options: dict[str, Any] = field(default_factory=dict)
    has_streams: bool = True

    @property
    def name(self) -> str:
        return f"{self.label} | {self.strategy} | {self.mesh}"

    @property
    def close(self) -> float:
        return CLOSE[self.plain_dtype]

    @property
    def num_ranks(self) -> int:
        return math.prod(MESHES[self.mesh][0])


def _quantized() -> nn.Module:
    register_format(ScaledFloat8Format)
    model = models.Stack()
    quantize_linears(model)
    return model


def _two_way() -> nn.Module:
    register_format(TwoWayFormat)
    return Layers()


def _pairs(model: Any) -> list[Any]:
    return [list(model.blocks[:2]), model.blocks[2]]


_ON_MESHES = (
    "plain",
    "accumulation, every backward synchronized",
    "accumulation under no_sync",
    "tied parameters across units",
    "unit skipped on some steps",
    "unit skipped on some ranks",
    "parameter group unused on some ranks",
)
_OFFLOAD = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
_FEATURES: dict[str, dict[str, Any]] = {
    "bf16": {"options": {"mp_policy": BF16}, "plain_dtype": torch.bfloat16},
    "CPU offload": {"options": _OFFLOAD},
    "float8 and a scale": {"build": _quantized},
    "weights in two forms": {"build": _two_way},
    "trace pool": {"options": {"enable_trace_pool": True}},
    "two blocks in one unit": {"units": _pairs},
    "no prefetch": {"options": {"enable_unshard_prefetch": False}},
    "reductions that are waited for": {"options": {"enable_async_reduce_grad": False}},
    "one gradient buffer": {"options": {"max_live_grad_buffers": 1}},
    "two units ahead": {"options": {"unshard_prefetch_depth": 2}},
    "kept after a forward": {"options": {"reshard_after_forward": False}},
    "accumulation on a CPU": {"pattern": "accumulation under no_sync", "has_streams": False},
    "bf16 on a CPU": {
        "options": {"mp_policy": BF16},
        "plain_dtype": torch.bfloat16,
        "has_streams": False,
    },
}
_FEATURES_OF_ZERO_3 = ("two units ahead", "kept after a forward")
_FEATURES_ON_MESHES = ("bf16", "CPU offload", "float8 and a scale", "accumulation on a CPU")


def _cases() -> Iterator[Case]:
    for label, pattern in PATTERNS.items():
        # ZeRO-3 does not support units that only some ranks skip.
        strategies = STRATEGIES[:-1] if pattern.skips else STRATEGIES
        if not pattern.clips:
            for strategy in strategies:
                yield Case("parity", label, strategy, "3", label)
    for mesh in ("HSDP 2x2", "HFSDP 2x2"):
        for label in _ON_MESHES:
            for strategy in strategies_on(mesh):
                if not (PATTERNS[label].skips and strategy == FULL):
                    yield Case("meshes", label, strategy, mesh, label)
    for label, more in _FEATURES.items():
        for strategy in (FULL,) if label in _FEATURES_OF_ZERO_3 else STRATEGIES:
            yield Case("features", label, strategy, "2", **more)
        if label in _FEATURES_ON_MESHES:
            for mesh in ("HSDP 2x2", "HFSDP 2x2"):
                yield Case("features", label, FULL, mesh, **more)


CASES = {case.name: case for case in _cases()}
