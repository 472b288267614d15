"""Runs a described training as one rank of a simulated cluster, on the meta device.

The runtime itself runs: units, parameter groups, schedules, communication streams. A description
becomes a module (`plan/model.py`), which a `StepRecorder` and a `MemoryWatch` observe.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, override

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fsdp_v2.diagnostics.memory_ledger import Ledger
from megatron_fsdp_v2.diagnostics.memory_watch import MemoryWatch
from megatron_fsdp_v2.memory.host_memory import is_in_host_memory
from megatron_fsdp_v2.params.group import ParameterGroup
from megatron_fsdp_v2.plan.description import (
    MeshDescription,
    ParameterDescription,
    Strategy,
    TrainingDescription,
    UnitDescription,
    mesh_sizes,
)
from megatron_fsdp_v2.plan.machine import Machine
from megatron_fsdp_v2.plan.model import DescribedUnit, build, in_order_of_owners
from megatron_fsdp_v2.plan.simulation import (
    Device,
    HostDevice,
    Queue,
    VirtualStreams,
    run_on_streams,
    simulated_ranks,
)
from megatron_fsdp_v2.plan.simulation.devices import COMPUTE
from megatron_fsdp_v2.plan.step import Step, StepRecorder
from megatron_fsdp_v2.runtime.api import fully_shard
from megatron_fsdp_v2.runtime.module import unit_of
from megatron_fsdp_v2.runtime.options import RuntimeOptions, UnitOptions


@dataclass(frozen=True)
class PlannedGroup:
    """A parameter group of the planned training.

    Attributes:
        unit: Its unit.
        params: Its parameters, in the order of the flat buffer.
        group: The group, on the meta device.
    """

    unit: UnitDescription
    params: tuple[ParameterDescription, ...]
    group: ParameterGroup


@dataclass(frozen=True)
class Run:
    """A step of a training in the steady state, on the first rank.

    Attributes:
        step: Events and times of the step.
        groups: Its parameter groups, unit by unit.
        device_memory: Bytes on the device.
        host_memory: Bytes of offloaded tensors.
    """

    step: Step
    groups: Sequence[PlannedGroup]
    device_memory: Ledger
    host_memory: Ledger


def run_training(
    training: TrainingDescription, strategy: Strategy, machine: Machine | None = None
) -> Run:
    """Run a training's second step, as the first rank of a simulated cluster.

    Args:
        training: The training.
        strategy: How it is sharded.
        machine: Gives the times of collectives and computation; None for no times.

    Raises:
        ValueError: The strategy is unknown or does not fit the meshes.
        RuntimeError: This process has a process group.
    """
    device: Device = HostDevice() if training.on_cpu else VirtualStreams()
    num_ranks = max(mesh.num_ranks * mesh.stride for mesh in training.meshes.values())
    with simulated_ranks(num_ranks, device, machine), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        units = build(training, device, machine)
        _shard(training, strategy, units)
        if isinstance(device, VirtualStreams):
            run_on_streams(units[0], device)
        return _run(training, units, device, machine)


def _shard(
    training: TrainingDescription, strategy: Strategy, units: Sequence[DescribedUnit]
) -> None:
    meshes = {
        name: _mesh(mesh, mesh_sizes(mesh, strategy)) for name, mesh in training.meshes.items()
    }
    options = _options(training)
    for unit in in_order_of_owners(units):
        described = unit.described
        drops = training.reshard_after_forward and not described.keeps_gathered
        fully_shard(
            unit,
            mesh=meshes[described.mesh],
            sharding_strategy=strategy.inner_of(described.mesh),
            outer_dp_sharding_strategy=strategy.outer,
            mp_policy=training.policy,
            reshard_after_forward=drops,
            shard_granularity=training.granularity,
            offload_policy=CPUOffloadPolicy() if training.cpu_offload else None,
            options=UnitOptions(
                runtime=options,
                separate_params=frozenset(
                    unit.get_parameter(f"param_{index}")
                    for index, param in enumerate(described.params)
                    if param.is_separate
                ),
            ),
        )


def _options(training: TrainingDescription) -> RuntimeOptions:
    """Options of the root; no other rank exists to compare with."""
    options = replace(training.options, check_ranks="never", enable_trace_pool=False)
    if training.num_extra_gathered:
        depth = (options.unshard_prefetch_depth or 1) + training.num_extra_gathered
        options = replace(options, unshard_prefetch_depth=depth)
    return options


def _mesh(mesh: MeshDescription, sizes: Sequence[int]) -> DeviceMesh:
    ranks = torch.arange(mesh.num_ranks, dtype=torch.int64) * mesh.stride
    return DeviceMesh("meta", ranks.view(*sizes))


class _NoOptimizer(torch.optim.Optimizer):
    """An optimizer whose step changes nothing and runs the runtime's hooks."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @override
    def step(self, closure: Any = None) -> Any:
        del closure


class _WithoutValues(TorchDispatchMode):
    """Answers host reads of meta tensors, and passes copies to `look`.

    Args:
        look: Called with the tensor that is written and the one that is read.
    """

    def __init__(self, look: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._look = look

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        if packet is torch.ops.aten._local_scalar_dense:
            return False
        if packet is torch.ops.aten.copy_:
            self._look(args[0], args[1])
        return func(*args, **(kwargs or {}))


def _run(
    training: TrainingDescription,
    units: Sequence[DescribedUnit],
    device: Device,
    machine: Machine | None,
) -> Run:
    root = units[0]
    groups = [
        PlannedGroup(unit.described, unit.described_params(group.names), group)
        for unit in units
        for group in unit_of(unit).groups
    ]
    meshes = {
        each.group.name: (each.unit.mesh, training.meshes[each.unit.mesh].stride) for each in groups
    }
    names = {unit_of(unit).fqn: unit.described.name for unit in units}
    optimizer = _NoOptimizer(root.parameters())
    recorder = StepRecorder(root, names, meshes, device, machine)
    device_memory, host_memory = Ledger(), Ledger()

    def look(into: torch.Tensor, source: torch.Tensor) -> None:
        to_host, from_host = is_in_host_memory(into), is_in_host_memory(source)
        if to_host and not from_host:
            recorder.step.to_host_nbytes += recorder.times * into.nbytes
        elif from_host and not to_host:
            recorder.step.to_device_nbytes += recorder.times * source.nbytes

    steps = _Steps(training, root, optimizer, recorder, device.timeline.queues[COMPUTE])
    with _WithoutValues(look), recorder:
        # The first step shows the order in which units run.
        steps.run()
        recorder.restart()
        with MemoryWatch(root, None, device_memory, host_memory):
            steps.run()
    return Run(recorder.step, groups, device_memory, host_memory)


@dataclass
class _Steps:
    """Steps of a training: warm-up forwards, forwards and backwards in turn, other backwards.

    Attributes:
        training: The training.
        root: The root.
        optimizer: The optimizer.
        recorder: Records the step; `times` is set for every micro-batch.
        compute: Queue of computation.
        outputs: Outputs of forwards without a backward yet.
    """

    training: TrainingDescription
    root: Any
    optimizer: torch.optim.Optimizer
    recorder: StepRecorder
    compute: Queue
    outputs: deque[torch.Tensor] = field(default_factory=deque)

    def run(self) -> None:
        """Run a step. Micro-batches in the middle are equal, so only one of them runs."""
        training, count = self.training, self.training.num_microbatches
        ahead = min(training.num_in_flight - 1, count - 1)
        for _ in range(ahead):
            with self._standing_for(1):
                self._forward()
        pairs = count - ahead
        for position in sorted({0, 1, pairs - 1} & set(range(pairs))):
            with self._standing_for(pairs - 2 if position == 1 and pairs > 2 else 1):
                self._forward()
                self._backward(is_last=position == count - 1)
        with self._standing_for(1):
            for number in range(pairs, count):
                self._backward(is_last=number == count - 1)
            if training.syncs_afterwards:
                self.root.reduce_grad()
            self.optimizer.step()
            self.optimizer.zero_grad()

    @contextlib.contextmanager
    def _standing_for(self, times: int) -> Iterator[None]:
        recorder, began, busy = self.recorder, self.recorder.now, self.compute.busy
        recorder.times = times
        yield
        recorder.skip((times - 1) * (recorder.now - began))
        recorder.step.compute_seconds += times * (self.compute.busy - busy)
        recorder.times = 1

    def _forward(self) -> None:
        self.outputs.append(self.root(torch.empty(0, device="meta")))

    def _backward(self, *, is_last: bool) -> None:
        training, output = self.training, self.outputs.popleft()
        is_synced = is_last if training.defers_sync else True
        is_synced &= not training.syncs_afterwards
        with nullcontext() if is_synced else self.root.no_sync():
            torch.autograd.backward(output, torch.empty_like(output))
