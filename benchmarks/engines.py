"""The compared engines: each prepares a model for training; all run the same steps."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, override

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TheirPolicy

from benchmarks import common, upstream
from benchmarks.cases import Setting
from benchmarks.common import STRATEGIES
from benchmarks.model import Layer, Model, loss_of
from megatron_fsdp_v2 import RuntimeOptions, fully_shard, group_modules
from megatron_fsdp_v2.optim import flat_optimizer

__all__ = ["BASELINE", "ENGINES", "PLAIN", "USUAL", "Engine", "Plain", "Training", "build"]

BASELINE = "FSDP2"
PLAIN = "plain loop"
ZERO_3 = STRATEGIES[-1]
RATE = 1e-3
ONE_BUFFER = RuntimeOptions(max_live_grad_buffers=1)

Context = Callable[[], contextlib.AbstractContextManager[Any]]


class Training:
    """A model and its optimizer, ready for steps.

    Args:
        model: The model, called with tokens.
        optimizer: Its optimizer.
        unsynchronized: Context of all micro-batches except the last of a step.
        computing: Context of a forward.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        unsynchronized: Context = contextlib.nullcontext,
        computing: Context = contextlib.nullcontext,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self._unsynchronized = unsynchronized
        self._computing = computing
        self.optimizer_seconds = 0.0

    def compute(self, batches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run forward and backward of all micro-batches of `batches`; return their losses."""
        losses = []
        for number, inputs in enumerate(batches, start=1):
            is_last = number == len(batches)
            with contextlib.nullcontext() if is_last else self._unsynchronized():
                with self._computing():
                    loss = loss_of(self.model(inputs), inputs)
                (loss / len(batches)).backward()
            losses.append(loss.detach())
        return losses

    def step(self, batches: Sequence[torch.Tensor]) -> torch.Tensor:
        """Run one step; return the mean loss of its micro-batches on this rank.

        Sets `optimizer_seconds`; on a GPU it is host time.
        """
        losses = self.compute(batches)
        start = time.perf_counter()
        self.update()
        self.optimizer_seconds = time.perf_counter() - start
        return torch.stack(losses).mean()

    def update(self) -> None:
        """Perform the optimizer's part of a step."""
        self.optimizer.step()
        self.optimizer.zero_grad()


class Plain(Training):
    """A loop without sharding: gradients are averaged one by one after the backward.

    In bf16, the loop keeps fp32 main weights in addition to the model's weights.
    """

    def __init__(self, model: Model, setting: Setting) -> None:
        main = [param.detach().clone().requires_grad_() for param in model.parameters()]
        super().__init__(in_dtype(model, setting), adamw(main, setting))
        self.main = main

    @override
    def update(self) -> None:
        for param, main in zip(self.model.parameters(), self.main, strict=True):
            assert param.grad is not None
            main.grad = param.grad.to(main.dtype, copy=True)
            dist.all_reduce(main.grad)
            main.grad /= dist.get_world_size()
            param.grad = None
        super().update()
        with torch.no_grad():
            for param, main in zip(self.model.parameters(), self.main, strict=True):
                param.copy_(main)


Build = Callable[[Model, DeviceMesh, Setting], Training]


@dataclass(frozen=True)
class Engine:
    """A compared engine.

    Attributes:
        build: Prepares a model, identical across ranks, for training.
        strategy: Sharding strategy, which determines the limit.
        is_mapped: Whether the engine requires GPUs; without GPUs, it runs on stubs of `torch.cuda`.
    """

    build: Build
    strategy: str
    is_mapped: bool = field(default=False, kw_only=True)

    def context(
        self, device: str, *, building: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        """Return the context for building a model and for its steps."""
        if not self.is_mapped:
            return contextlib.nullcontext()
        return upstream.mapped_to(device, building=building)


def adamw(
    params: Any, setting: Setting, rate: float = RATE, *, is_flat: bool = False
) -> torch.optim.Optimizer:
    """Build the optimizer of an engine: AdamW, on flat tensors if `is_flat`."""
    kind: Any = torch.optim.AdamW
    if is_flat:
        kind = flat_optimizer(kind)
    made: torch.optim.Optimizer = kind(
        params, lr=rate, foreach=setting.optimizer == "foreach" or None
    )
    return made


def in_dtype(model: Model, setting: Setting) -> Model:
    """Convert the model to the compute dtype, in place."""
    return model.bfloat16() if setting.in_bf16 else model


def _policy(setting: Setting) -> TheirPolicy:
    """Return a policy in which gradients are communicated in the compute dtype."""
    return TheirPolicy(param_dtype=torch.bfloat16 if setting.in_bf16 else None)


def _plain(model: Model, mesh: DeviceMesh, setting: Setting) -> Training:
    del mesh
    return Plain(model, setting)


def _ddp(model: Model, mesh: DeviceMesh, setting: Setting) -> Training:
    # The usual setup: the model's weights are fp32, and autocast converts them to bf16.
    wrapped = common.wrap_with_ddp(model, mesh)
    casts = torch.autocast(mesh.device_type, torch.bfloat16, enabled=setting.in_bf16)
    return Training(
        wrapped,
        adamw(wrapped.parameters(), setting),
        unsynchronized=wrapped.no_sync,
        computing=lambda: casts,
    )


def _fsdp2(*, reshards: bool) -> Build:
    def build_fsdp2(model: Model, mesh: DeviceMesh, setting: Setting) -> Training:
        options = {"mp_policy": _policy(setting), "reshard_after_forward": reshards}
        common.wrap_with_fsdp2(model, mesh, **options)
        return Training(model, adamw(model.parameters(), setting))

    return build_fsdp2


def _ours(strategy: str, *, is_flat: bool = False, **options: Any) -> Build:
    def build_ours(model: Model, mesh: DeviceMesh, setting: Setting) -> Training:
        shard = partial(fully_shard, mesh=mesh, sharding_strategy=strategy, **options)
        for layers in group_modules(model.layers):
            shard(layers, mp_policy=_policy(setting))
        sharded: Any = shard(model, mp_policy=_policy(setting))
        optimizer = adamw(sharded.parameters(), setting, is_flat=is_flat)
        return Training(sharded, optimizer, unsynchronized=sharded.no_sync)

    return build_ours


def _megatron_fsdp(strategy: str) -> Build:
    def build_v1(model: Model, mesh: DeviceMesh, setting: Setting) -> Training:
        package = upstream.package()
        # Megatron-FSDP needs a tensor-parallel axis, even of size 1, and a mesh of experts to
        # average gradients.
        names = ("fsdp", "tp")
        grid = init_device_mesh(mesh.device_type, (mesh.size(), 1), mesh_dim_names=names)
        policy = package.MixedPrecisionPolicy(
            main_grads_dtype=torch.float32,
            grad_comm_dtype=torch.bfloat16 if setting.in_bf16 else None,
        )
        model = in_dtype(model, setting)
        wrapped, optimizer = package.fully_shard(
            model,
            adamw(model.parameters(), setting, rate=0.0),
            device_mesh=grid,
            expt_device_mesh=grid,
            dp_shard_dim="fsdp",
            tp_dim="tp",
            fsdp_unit_modules=[Layer],
            zero_dp_strategy=strategy,
            mixed_precision_policy=policy,
            device=_device(mesh),
            # Only NCCL supports the default reduction.
            average_in_collective=True,
            sync_model_each_microbatch=setting.micro_batches == 1,
            preproc_state_dict_for_dcp_ckpt=False,
        )
        # `fully_shard` runs an optimizer step with zero gradients to create state. This step must
        # not decay weights, hence the rate of zero, or count as a step of Adam.
        for state in optimizer.state.values():
            state["step"].zero_()
        for group in optimizer.param_groups:
            group["lr"] = RATE
        return Training(wrapped, optimizer, unsynchronized=wrapped.no_sync)

    return build_v1


def _experimental(model: Model, mesh: DeviceMesh, setting: Setting) -> Training:
    package = upstream.experimental()
    flat = [package.Flat()]
    placements = package.Placements(dp_axes=[0], parameter=flat, gradient=flat, optimizer=flat)
    policy = upstream.package().MixedPrecisionPolicy(main_grads_dtype=torch.float32)
    model = in_dtype(model, setting)
    for unit in common.units_of(model):
        package.fully_shard(unit, mesh, placements, policy)
    optimizer = adamw(model.parameters(), setting)
    package.fully_shard_optimizer(optimizer)
    return Training(model, optimizer)


def _device(mesh: DeviceMesh) -> torch.device:
    index = torch.cuda.current_device() if mesh.device_type == "cuda" else None
    return torch.device(mesh.device_type, index)


V1 = "Megatron-FSDP v1"
ENGINES: dict[str, Engine] = {
    PLAIN: Engine(_plain, "no_shard"),
    "DDP": Engine(_ddp, "no_shard"),
    BASELINE: Engine(_fsdp2(reshards=True), ZERO_3),
    "FSDP2, optim_grads": Engine(_fsdp2(reshards=False), "optim_grads"),
    **{f"{V1}, {name}": Engine(_megatron_fsdp(name), name, is_mapped=True) for name in STRATEGIES},
    "Megatron-FSDP v2, experimental": Engine(_experimental, ZERO_3, is_mapped=True),
    **{f"ours, {name}": Engine(_ours(name), name) for name in STRATEGIES},
    **{
        f"ours, {name}, pool": Engine(_ours(name, enable_trace_pool=True), name)
        for name in STRATEGIES
    },
    f"ours, {ZERO_3}, pool, flat": Engine(
        _ours(ZERO_3, enable_trace_pool=True, is_flat=True), ZERO_3
    ),
    **{f"ours, {name}, flat": Engine(_ours(name, is_flat=True), name) for name in STRATEGIES},
    "ours, max_live_grad_buffers=1": Engine(_ours(ZERO_3, options=ONE_BUFFER), ZERO_3),
    "ours, that and without prefetch": Engine(
        _ours(ZERO_3, options=ONE_BUFFER, enable_unshard_prefetch=False), ZERO_3
    ),
}
"""Engines by name. The plain loop is the reference for the losses of all others."""

_RARE = {"FSDP2, optim_grads", "ours, max_live_grad_buffers=1", "ours, that and without prefetch"}
_RARE |= {f"{V1}, {name}" for name in STRATEGIES[:-1]}
USUAL = [name for name in ENGINES if name not in _RARE]
"""Engines that are timed by default."""


def build(name: str, setting: Setting, mesh: DeviceMesh) -> Training:
    """Prepare an engine's model."""
    torch.manual_seed(0)
    model = Model(setting.shape, recomputes=setting.recomputes).to(_device(mesh))
    with ENGINES[name].context(mesh.device_type, building=True):
        return ENGINES[name].build(model, mesh, setting)
