"""What the machine asks for: commands, and facts about tensors that decide between commands.

`runtime/unit.py`, `runtime/context.py` and `params/gradients.py` execute them with tensors; the
exhaustive exploration (`tests/machine/`) executes them with counters.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from megatron_fsdp_v2.layout.weight_use import WeightUse


class GroupCommands(Protocol):
    """Executes commands for the gradients of one parameter group."""

    @property
    def accumulates_unreduced(self) -> bool:
        """Whether the full gradient accumulates until the synchronized backward."""

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient arrived since the last reduction."""

    @property
    def has_partial(self) -> bool:
        """Whether a partial gradient waits for the reduction along the outer axis."""

    @property
    def is_arriving(self) -> bool:
        """Whether the full gradient buffer has memory, so that gradients can be added to it."""

    @property
    def is_owed(self) -> bool:
        """Whether an earlier backward left its gradients to the next synchronized backward."""

    @property
    def is_trained(self) -> bool:
        """Whether any parameter requires a gradient now."""

    @property
    def reduces_partial(self) -> bool:
        """Whether a reduction along the outer axis follows the reduction along the inner axis."""

    @property
    def queues_partial(self) -> bool:
        """Whether the outer reduction may be queued before the host waits for the inner one."""

    def reduce(self, *, async_op: bool) -> None:
        """Issue the reduction along the inner axis. Collective."""

    def end_inner(self) -> None:
        """Wait for the reduction along the inner axis, and free the full gradient."""

    def reduce_outer(self, *, async_op: bool) -> None:
        """Issue the reduction along the outer axis. Collective."""

    def end_outer(self) -> None:
        """Wait for the reduction along the outer axis, and free the partial gradient."""

    def owe(self) -> None:
        """Record that a later backward synchronizes the gradients of the trained parameters."""

    def abandon(self) -> None:
        """Discard gradients that are not reduced yet."""

    @property
    def name(self) -> str:
        """Name of the group, for reports."""


class UnitCommands(Protocol):
    """Executes commands for the weights of one unit."""

    @property
    def name(self) -> str:
        """Name of the unit, for error messages."""

    def check_pass(self) -> None:
        """Raise if no pass may begin with the unit."""

    def check_owned(self) -> None:
        """Raise if a trained parameter below the unit was registered that no unit owns."""

    def gather(self, uses: WeightUse, *, adds: bool, async_op: bool) -> None:
        """Issue gathers, after a refresh of stale weights if this use refreshes. Collective.

        Args:
            uses: Uses to gather for.
            adds: Whether weights are gathered, so that only missing payloads are added.
            async_op: Whether the host may go on before the gathers are done.
        """

    def wait(self) -> None:
        """Wait for the gathers and register the gathered parameters."""

    def free(self, *, after_error: bool) -> None:
        """Register the sharded parameters and free gathered weights.

        Args:
            after_error: Whether another error was raised, so that none is raised here.
        """

    def settle(self) -> None:
        """Free weights that an exception in a command has left gathered, after `free`."""

    def abandon(self) -> None:
        """Drop collectives under way and gradients, and free everything temporary."""

    def sync(self) -> None:
        """Adopt the tensors that user code assigned to parameters and modules."""

    def is_changed(self) -> bool:
        """Return whether user code assigned or wrote parameters since weights were gathered."""

    def is_outdated(self) -> bool:
        """Return whether gathered weights differ from what a gather would install now."""

    def check_is_gathered(self) -> None:
        """Raise if the weights needed by the part of the backward that just ran were absent."""

    def compare_reduction(self, *, along_all: bool) -> None:
        """Check that every rank is about to reduce this unit. Collective."""

    def collect_assigned(self) -> None:
        """Collect gradients that were assigned to gathered parameters."""

    def restore_inputs(self) -> None:
        """Put replaced arguments of an unfinished forward back."""

    def end_backward(self, forward: Any) -> None:
        """Handle the end of the backward of a forward; see `events.last_gradient`."""


class RootCommands(Protocol):
    """Executes commands for all units under one root."""

    @property
    def engine_run(self) -> int:
        """Number of the run of the autograd engine that calls; -1 outside of the engine."""

    @property
    def is_capturing(self) -> bool:
        """Whether operations queued now are captured in a CUDA graph."""

    def check_captured_pass(self, unit: Any, phase: str) -> None:
        """Raise if a capture of a CUDA graph begins or ends within the pass.

        Args:
            unit: Executes the commands of the unit that runs now.
            phase: Whether it runs its `forward` or `backward`.
        """

    def begin_capture(self) -> None:
        """Check that a pass can be captured, and begin it."""

    def has_new_values(self) -> bool:
        """Return whether replicated weights were written at random since the last call."""

    def check_hooks(self) -> None:
        """Raise if a user registered a hook that parameters do not call."""

    def check_units(self) -> None:
        """Check that all ranks sharded the model identically. Collective."""

    def forget_casts(self) -> None:
        """Clear autocast's casts of weights that are freed between their uses."""

    def begin_stream(self) -> None:
        """Order the communication of the pass after the current stream."""

    def begin_allocations(self, name: str, *, no_pending_backward: bool) -> None:
        """Begin a pass of the allocator."""

    def end_allocations(self, name: str, *, no_pending_backward: bool) -> None:
        """End a pass of the allocator."""

    def has_stale(self) -> bool:
        """Return whether weights are due to be refreshed by a collective."""

    def write_stale(self) -> None:
        """Write the stale weights of formats that communicate. Collective."""

    def refresh_all(self, *, async_op: bool) -> None:
        """Refresh all stale weights whose refresh is a collective. Collective."""

    def wait_for_refreshes(self) -> None:
        """Wait for all refreshes."""

    def wait_for_host_memory(self) -> None:
        """Block the host until the copies from offloaded main weights are complete."""

    def queue_end(self) -> None:
        """Let the engine report the end of its run."""

    def end_reductions(self) -> None:
        """Finish all reductions, and drop gradients that no rank had. Collective."""

    def run_hooks(self, units: Sequence[Any]) -> None:
        """Call users' hooks on reduced gradients."""

    def repairing(self) -> AbstractContextManager[Any]:
        """Return a context manager that allows writes to gradients."""

    def snapshot(self, groups: Sequence[Any]) -> Any:
        """Return the gradients that the reductions of these groups will write."""

    def drop_gradients(self, before: Any, *, is_shared: bool) -> None:
        """Undo what unfinished reductions wrote, and drop gradients that are not reduced.

        Args:
            before: Result of `snapshot`.
            is_shared: Whether another rank may have finished this backward. Collective then.
        """
