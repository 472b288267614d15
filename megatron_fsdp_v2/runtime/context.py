"""What the units of one root share: communicator, allocator, options, and commands for all."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch

from megatron_fsdp_v2._compiler import reject_compiled_autograd, uncompiled
from megatron_fsdp_v2.comm.backends import communicator_for, is_capturing
from megatron_fsdp_v2.comm.interface import AbortedCommunicator, Communicator
from megatron_fsdp_v2.comm.record import RECORD
from megatron_fsdp_v2.memory.allocator import Allocator
from megatron_fsdp_v2.memory.observer import Observer
from megatron_fsdp_v2.memory.trace_pool import TracePoolAllocator
from megatron_fsdp_v2.params.gradients import GroupGrads
from megatron_fsdp_v2.params.group import ParameterGroup, write_stale_weights
from megatron_fsdp_v2.runtime.machine import events, reductions
from megatron_fsdp_v2.runtime.machine.state import ProcessState, RootState, UnitState
from megatron_fsdp_v2.runtime.offloading import Offloaded
from megatron_fsdp_v2.runtime.options import RuntimeOptions
from megatron_fsdp_v2.runtime.unit_checks import check_capture, check_units
from megatron_fsdp_v2.runtime.unit_groups import UnitGroups

type _Found = list[tuple[GroupGrads, list[torch.Tensor | None]]]

PROCESS = ProcessState()
"""State that all roots of this process share."""


def live[T](refs: Iterable[Callable[[], T | None]]) -> list[T]:
    """Return the referenced objects that are not deleted."""
    return [each for ref in refs if (each := ref()) is not None]


class Context[UnitT: UnitGroups]:
    """What the units under one root share. `UnitT` is `Unit`, whose file imports this one.

    Attributes:
        communicator: Issues collectives.
        allocator: Makes temporary buffers.
        options: Options of the root.
        observer: Receives events of the units.
        state: State in the machine.
        device: Device of the units' buffers.
        offloaded: Their memory while it is in host memory; None otherwise.
    """

    def __init__(
        self, device: torch.device, options: RuntimeOptions, observer: Observer | None = None
    ) -> None:
        """Make the communicator and the allocator that the options ask for.

        Args:
            device: Device of the communicator.
            options: Options of the root.
            observer: An observer that has subscribers; None for a new one.
        """
        self.communicator: Communicator = communicator_for(device)
        self.allocator = TracePoolAllocator() if options.enable_trace_pool else Allocator()
        self.options = options
        self.observer = Observer() if observer is None else observer
        self.state = RootState(PROCESS, weakref.proxy(self), options.control, self.observer.phase)
        self.device: torch.device | None = None
        self.offloaded: Offloaded | None = None
        self._units: list[weakref.ref[UnitT]] = []
        # The end-of-backward callback; the engine drops it together with a failed graph task.
        self._end: weakref.ref[object] | None = None

    def set_units(self, units: Sequence[UnitT]) -> None:
        """Register the units, which share what the context has from now on.

        Units hold the context; the context holds units weakly.

        Args:
            units: All units under the root with their names, the root's own first, parents before
                children as `modules()` lists them.
        """
        self._units = [weakref.ref(unit) for unit in units]
        for unit in units:
            for number, group in enumerate(unit.groups):
                name = f"{unit.fqn or unit.class_name}/{number}"
                group.join(name, self.communicator, self.allocator, self.observer)
        groups = self.groups()
        self.device = next((group.device for group in groups), None)
        state = self.state
        state.has_formats = any(group.format.communicates for group in groups)
        # If no use of a unit is a collective, ranks may run different units.
        state.ranks_may_differ = any(
            a.size > 1 for group in groups for a in group.axes
        ) and not any(unit.state.is_collective for unit in units)
        by_name = {name: unit.state for unit in units for name in unit.state.fqn.split(", ")}
        for unit in units:
            unit.state.ancestors = [
                by_name[above]
                for name in unit.state.fqn.split(", ")
                for above in ("", *itertools.accumulate(name.split(".")[:-1], "{}.{}".format))
                if above in by_name and name
            ]
        events.adopt(state, [unit.state for unit in units])

    def units(self) -> list[UnitT]:
        """Live units, parents before children."""
        return [unit for ref in self._units if (unit := ref()) is not None]

    def groups(self) -> list[ParameterGroup]:
        """Parameter groups of all live units."""
        return [group for unit in self.units() for group in unit.groups]

    def change_options(self, **changes: Any) -> None:
        """Change options of reductions, between passes."""
        self.options = dataclasses.replace(self.options, **changes)
        self.state.control = self.options.control
        for unit in self.units():
            # A root that is made around these units later inherits the values.
            unit.root_options.update(changes)

    def check_is_ready(self) -> None:
        """Raise if the units were aborted, or their memory is in host memory."""
        if isinstance(self.communicator, AbortedCommunicator):
            raise RuntimeError(self.communicator.reason)
        self.check_is_loaded()

    def check_is_loaded(self) -> None:
        """Raise if the memory of the units is in host memory."""
        if self.offloaded is not None:
            raise RuntimeError(
                f"{self.units()[0].name} was moved to host memory by offload(); call reload() on "
                "it first"
            )

    # -- commands: checks and captures ----------------------------------------------------------

    @property
    def engine_run(self) -> int:
        """Number of the run of the autograd engine that calls; -1 outside of the engine."""
        return torch._C._current_graph_task_id()

    @property
    def is_capturing(self) -> bool:
        """Whether operations queued now are captured in a CUDA graph."""
        return self.device is not None and is_capturing(self.device)

    def check_captured_pass(self, unit: UnitT, phase: str) -> None:
        """Raise if a capture of a CUDA graph begins or ends within the pass.

        Args:
            unit: The unit that runs now.
            phase: Whether it runs its `forward` or `backward`.
        """
        is_capturing = self.is_capturing
        if is_capturing != self.state.is_captured:
            here, there = ("in", "outside") if is_capturing else ("outside", "in")
            raise RuntimeError(
                f"the {phase} of {unit.name} runs {here} the capture of a CUDA graph, and the "
                f"forward of {self.units()[0].name} began {there} it; capture forward and backward "
                "together"
            )

    def begin_capture(self) -> None:
        """Check that a pass or step that begins now can be captured, and begin it."""
        check_capture(self.units(), self.options, self.state)
        # A capture cannot wait for the stream of earlier passes.
        self.communicator.begin_pass(reuses_memory=False)

    def has_new_values(self) -> bool:
        """Return whether random numbers were written into replicated weights since the last call.

        Ranks compare these weights again.
        """
        drawn = [group for group in self.groups() if group.info.is_drawn]
        for group in drawn:
            group.info.is_drawn = False
        return any([group.has_replicas for group in drawn])

    def check_hooks(self) -> None:
        """Raise if a user registered a hook that parameters do not call."""
        for group in self.groups():
            group.parameters.check_hooks()

    def check_units(self) -> None:
        """Check that all ranks sharded the model identically. Collective."""
        check_units(self.units(), compares_ranks=self.options.check_ranks != "never")

    def forget_casts(self) -> None:
        """Clear autocast's cache if a unit frees its weights between its uses.

        The cache has casts of weights from earlier passes of the same autocast context, also from
        those without gradients. A gradient would reach the weight through the node of such a cast,
        after the backward of the unit has ended. Passes of one loss share their casts, as in a
        plain loop; a recomputation and the first pass of a loss do not use earlier ones.
        """
        device = self.device
        if (
            device is not None
            and torch.amp.autocast_mode.is_autocast_available(device.type)
            and torch.is_autocast_enabled(device.type)
            and torch.is_autocast_cache_enabled()
            and any(unit.is_collective for unit in self.state.units)
        ):
            torch.clear_autocast_cache()

    # -- commands: passes -----------------------------------------------------------------------

    def begin_stream(self) -> None:
        """Order the communication of the pass after the current stream."""
        self.communicator.begin_pass()

    def begin_allocations(self, name: str, *, no_pending_backward: bool) -> None:
        """Begin a pass of the allocator."""
        RECORD.begin(name)
        self.allocator.begin_pass(name, no_pending_backward=no_pending_backward)

    def end_allocations(self, name: str, *, no_pending_backward: bool) -> None:
        """End a pass of the allocator."""
        self.allocator.end_pass(name, no_pending_backward=no_pending_backward)

    def has_stale(self) -> bool:
        """Return whether weights are due to be refreshed by a collective.

        A refresh without one happens at a unit's use, so ranks that run different units differ.
        """
        version, groups = self.state.weight_version, self.groups()
        return any(not g.is_refreshed_locally and g.is_stale(version) for g in groups)

    def write_stale(self) -> None:
        """Write the stale weights of formats that communicate. Collective."""
        write_stale_weights(self.groups(), self.state.weight_version)

    def refresh_all(self, *, async_op: bool) -> None:
        """Refresh all stale weights whose refresh is a collective. Collective."""
        for group in self.groups():
            if not group.is_refreshed_locally and not group.is_held:
                group.parameters.sync()
                group.refresh(self.state.weight_version, async_op=async_op)

    def wait_for_refreshes(self) -> None:
        """Wait for all refreshes."""
        for group in self.groups():
            group.wait_for_refresh()

    def wait_for_host_memory(self) -> None:
        """Make the host wait for copies from offloaded main weights, which it may write next."""
        if any(group.spec.offload is not None for group in self.groups()):
            self.communicator.synchronize()

    # -- commands: backwards --------------------------------------------------------------------

    def queue_end(self) -> None:
        """Let the engine report the end of its run, or that it failed."""
        reject_compiled_autograd(lambda: self.units()[0].name)
        self.check_is_ready()
        RECORD.begin("backward")
        # Only the engine holds the callback, and frees it when the backward ends or fails. The
        # callback keeps the context of a model that was deleted after its forward.
        end = functools.partial(uncompiled(_end_backward), self)
        self._end = weakref.ref(end, functools.partial(_dropped, self.state))
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def end_reductions(self) -> None:
        """Finish all reductions, and drop gradients that no rank had. Collective."""
        groups = self._grads()
        _end_missing(groups)
        for grads in groups:
            grads.end_reductions()

    def run_hooks(self, units: Sequence[UnitState]) -> None:
        """Call users' post-accumulate-grad hooks."""
        with torch.no_grad():
            for unit in units:
                for grads in cast("list[GroupGrads]", unit.groups):
                    grads.run_hooks()

    @contextmanager
    def repairing(self) -> Iterator[None]:
        """Allow writes to gradients inside the context.

        A repair may run in inference mode, and its gradients are used outside of it.
        """
        with torch.inference_mode(False), torch.no_grad():
            yield

    def snapshot(self, groups: Sequence[GroupGrads]) -> _Found:
        """Return the gradients that the reductions of these groups will write."""
        return [(grads, grads.param_grads()) for grads in groups]

    def drop_gradients(self, before: _Found, *, is_shared: bool) -> None:
        """Undo what unfinished reductions wrote, and drop gradients that are not reduced."""
        groups = self._grads()
        if is_shared:
            _end_missing(groups)
        for grads in groups:
            grads.wait()
        for grads, found in before:
            grads.restore(found)
        for grads in groups:
            grads.abandon()

    def _grads(self) -> list[GroupGrads]:
        return [group.grads for group in self.groups()]


def _end_missing(groups: Iterable[GroupGrads]) -> None:
    """Set gradients that no rank had in this backward to None, after its reductions. Collective.

    Ranks sum one flag per parameter of the reduced groups, in one all-reduce for each mesh. The
    host waits for the sums only if this rank lacks a gradient that another rank may have.

    Raises:
        RuntimeError: The host would wait while a CUDA graph is captured.
    """
    by_mesh: dict[tuple[object, ...], list[GroupGrads]] = {}
    for grads in groups:
        if grads.is_written:
            by_mesh.setdefault(grads.reduced_over, []).append(grads)
    for over, written in by_mesh.items():
        context = written[0].context
        # A property is read only where needed: most groups have all their gradients.
        depends = [g for g in written if not all(g.contributed) and g.depends_on_ranks]
        found = [each for grads in written for each in grads.contributed]
        if over and not is_capturing(context.device):
            flags = torch.ones(len(found), dtype=torch.float32, device=context.device)
            for has_gradient, run in itertools.groupby(range(len(found)), found.__getitem__):
                if not has_gradient:
                    # Kernels: a copy of flags from the host would wait for the device.
                    missing = list(run)
                    flags[missing[0] : missing[-1] + 1].zero_()
            context.all_reduce(flags)
            if depends:
                found = [total > 0 for total in flags.tolist()]
        elif over and depends:
            raise RuntimeError(
                f"a parameter of {depends[0].name} had no gradient in a backward captured in a "
                "CUDA graph, so the host would wait to see whether another rank had one; capture a "
                "step that uses every trained parameter, freeze those that it does not use, or "
                "shard with on_missing_grad='zero' if some parameter of each unit is used"
            )
        flags_left = iter(found)
        for grads in written:
            grads.end_missing(list(itertools.islice(flags_left, len(grads.contributed))))


def _end_backward[UnitT: UnitGroups](context: Context[UnitT]) -> None:
    reductions.end(context.state)


def _dropped(state: RootState, ref: object) -> None:
    del ref
    events.engine_dropped(state)
