"""Books the storages of a sharded model's step in a ledger as they are allocated and freed.

There are three sources. Parameter groups list the tensors that are always allocated. Events of the
root's observer report when temporary buffers gain and lose memory. All other storages are outputs
of torch operations, and are free when nothing refers to them.
"""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass
from typing import Any, override

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_fsdp_v2.diagnostics.memory_ledger import Account, Ledger, Role
from megatron_fsdp_v2.diagnostics.walk import parameters_below, units_below
from megatron_fsdp_v2.dtensor.sharded_rows import plain_of
from megatron_fsdp_v2.memory.allocator import BufferUse, TemporaryBuffer
from megatron_fsdp_v2.memory.host_memory import (
    is_in_host_memory,
    is_storage_in_host_memory,
    storages_in_host_memory,
)
from megatron_fsdp_v2.memory.observer import (
    BufferAcquired,
    BufferReleasing,
    Event,
    MainGradientAllocated,
    PhaseBegan,
    PhaseEnded,
)
from megatron_fsdp_v2.memory.trace_pool import TracePoolAllocator
from megatron_fsdp_v2.params.group import ParameterGroup

_ROLES = {
    BufferUse.GATHERED: Role.GATHERED,
    BufferUse.GRADIENT: Role.GRAD_BUFFER,
    BufferUse.COMMUNICATION: Role.COMMUNICATION,
}

_DIRECTIONS = ("forward", "backward")
"""A unit begins with the phase `pre_<direction>` and ends with `post_<direction>`."""

_IDLE = Account(Role.POOL, "")


@dataclass(slots=True, eq=False)
class _Known:
    """A tracked storage. The output of an operation is booked at the next operation or event.

    Attributes:
        ledger: The ledger that books it.
        account: Its account.
        nbytes: Its bytes; 0 for a temporary buffer, whose events book its bytes.
        ref: Weak reference, whose callback is called when the storage is freed.
        is_booked: Whether its bytes are in the ledger.
    """

    ledger: Ledger
    account: Account
    nbytes: int
    ref: weakref.ref[torch.UntypedStorage]
    is_booked: bool = False

    def book(self) -> None:
        """Add its bytes to the ledger. Idempotent."""
        if not self.is_booked:
            self.ledger.add(self.account, self.nbytes)
        self.is_booked = True

    def unbook(self) -> None:
        """Remove its bytes from the ledger. Idempotent."""
        if self.is_booked:
            self.ledger.remove(self.account, self.nbytes)
        self.is_booked = False

    def move(self, ledger: Ledger, account: Account) -> None:
        """Change its ledger and its account."""
        if self.ledger is ledger and self.account == account:
            return
        was_booked = self.is_booked
        self.unbook()
        self.ledger, self.account = ledger, account
        if was_booked:
            self.book()


class MemoryWatch(TorchDispatchMode):
    """Context manager that books the memory of a sharded module in ledgers.

    Args:
        module: The root.
        optimizer: Its optimizer; None books the optimizer's memory as activations.
        ledger: Ledger of the device's memory.
        host_ledger: Ledger of offloaded tensors, and of host tensors computed from them.

    Attributes:
        ledger: Ledger of the device's memory.
        host_ledger: Ledger of offloaded tensors, and of host tensors computed from them.
        device: The model's device.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        ledger: Ledger,
        host_ledger: Ledger,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._units = units_below(module)
        self._module = module
        self._optimizer = optimizer
        self.ledger = ledger
        self.host_ledger = host_ledger
        devices = [group.device for _, unit in self._units for group in unit.groups]
        if not devices:
            raise ValueError(f"{type(module).__name__} has no sharded parameters")
        self.device = devices[0]
        self._known: dict[int, _Known] = {}
        self._fresh: list[int] = []
        self._resizable: set[_Known] = set()
        self._running: list[tuple[str, str]] = []
        self._scopes: list[Account] = []
        # Names of units, by the owners in events: fully qualified names of units and groups.
        self._names: dict[str, str] = {}
        self._accounts: dict[TemporaryBuffer, Account] = {}
        self._undo = contextlib.ExitStack()

    # -- beginning and end ----------------------------------------------------------------------

    @override
    def __enter__(self) -> MemoryWatch:
        context = self._units[0][1].context
        if isinstance(context.allocator, TracePoolAllocator):
            for block in context.allocator.blocks():
                self._book_block(block)
        for name, unit in self._units:
            self._names[unit.fqn] = name
            for group in unit.groups:
                self._names[group.name] = name
                self._watch_group(name, group)
        context.observer.subscribe(self._receive)
        self._undo.callback(context.observer.unsubscribe, self._receive)
        if self._optimizer is not None:
            self._watch_optimizer(self._optimizer)
        rest = [p.local for p in parameters_below(self._module) if not p.is_sharded]
        for tensor in [*rest, *self._module.buffers()]:
            self._book(tensor, Account(Role.OTHER, ""))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    @override
    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._settle()
        self._undo.close()
        # References to storages refer to this watch, which refers to the model.
        self._known.clear()
        self._resizable.clear()

    def _watch_group(self, name: str, group: ParameterGroup) -> None:
        self._book(group.main_weight.tensor, Account(Role.MAIN_WEIGHT, name))
        self._book(group.model_weight.tensor, Account(Role.MODEL_WEIGHT, name))
        if group.main_grad is not None:
            self._book(group.main_grad.tensor, Account(Role.MAIN_GRAD, name))
        for buffer in group.temporaries().values():
            account = self._accounts[buffer] = Account(_ROLES[buffer.use], name)
            self._claim(buffer.tensor.untyped_storage(), account)
            if buffer.is_live:
                self._book_buffer(buffer)

    def _watch_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        account = Account(Role.OPTIMIZER, "")
        self._book_state(optimizer, account)
        self._book_offloaded(account)

        def begin(*args: Any) -> None:
            del args
            self._scopes.append(account)
            self.ledger.enter("optimizer step", "")

        def end(*args: Any) -> None:
            del args
            self._settle()
            self._book_state(optimizer, account)
            self._book_offloaded(account)
            self._scopes.remove(account)
            self.ledger.enter("after the step", "")

        self._undo.callback(optimizer.register_step_pre_hook(begin).remove)
        self._undo.callback(optimizer.register_step_post_hook(end).remove)

    def _book_state(self, optimizer: torch.optim.Optimizer, account: Account) -> None:
        """Book new optimizer state; the state of an offloaded parameter is offloaded too."""
        for param, state in optimizer.state.items():
            of_host = isinstance(param, torch.Tensor) and is_in_host_memory(plain_of(param))
            for value in tree_leaves(state):
                if isinstance(value, torch.Tensor):
                    self._book(value, account, of_host=of_host)

    # -- events ---------------------------------------------------------------------------------

    def _receive(self, event: Event) -> None:
        match event:
            case BufferAcquired(buffer) if buffer in self._accounts:
                self._book_buffer(buffer)
            case BufferReleasing(buffer) if buffer in self._accounts:
                self.ledger.remove(self._accounts[buffer], buffer.tensor.nbytes)
                if buffer.backing.block is not None:
                    self.ledger.add(_IDLE, buffer.tensor.nbytes)
            case MainGradientAllocated(buffer, flat) if buffer in self._accounts:
                # The main gradient is the output of the latest operation.
                known = self._known[flat.untyped_storage()._cdata]
                known.move(known.ledger, Account(Role.MAIN_GRAD, self._accounts[buffer].unit))
                self._settle()
            case PhaseBegan(owner, phase) if owner in self._names:
                self._begin_phase(self._names[owner], phase)
            case PhaseEnded(owner, phase) if owner in self._names:
                self._end_phase(self._names[owner], phase)

    def _begin_phase(self, name: str, phase: str) -> None:
        """Book allocations inside a phase of a unit as communication."""
        edge, _, direction = phase.partition("_")
        if edge == "pre" and direction in _DIRECTIONS:
            if not name and direction == "forward":
                self._running.clear()
            self._running.append((direction, name))
            self.ledger.enter(direction, name)
        self._scopes.append(Account(Role.COMMUNICATION, name))

    def _end_phase(self, name: str, phase: str) -> None:
        self._settle()
        self._scopes.pop()
        edge, _, direction = phase.partition("_")
        if edge == "post" and (direction, name) in self._running:
            self._running.remove((direction, name))
            self.ledger.enter(*(self._running[-1] if self._running else (direction, "")))

    def _book_buffer(self, buffer: TemporaryBuffer) -> None:
        """Book a temporary buffer that acquired memory."""
        # Memory that was freed for the buffer must not be counted together with it.
        self._settle()
        if buffer.backing.block is not None:
            self._book_block(buffer.backing.block)
            self.ledger.remove(_IDLE, buffer.tensor.nbytes)
        self.ledger.add(self._accounts[buffer], buffer.tensor.nbytes)
        # The storage of a buffer may change with every allocation.
        self._claim(buffer.tensor.untyped_storage(), self._accounts[buffer])

    # -- storages -------------------------------------------------------------------------------

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            # DTensor operations dispatch again with the local tensors.
            return NotImplemented
        self._settle()
        result = func(*args, **(kwargs or {}))
        made = [value for value in tree_leaves(result) if isinstance(value, torch.Tensor)]
        new = [value for value in made if self._is_new(value)]
        if new:
            of_host = any(self._is_of_host(value) for value in tree_leaves((args, kwargs)))
            for value in new:
                on_host = is_in_host_memory(value) or (of_host and value.device.type == "cpu")
                if on_host or value.device == self.device:
                    self._see(value, self.host_ledger if on_host else self.ledger)
        return result

    def _is_new(self, tensor: torch.Tensor) -> bool:
        is_strided = tensor.layout is torch.strided
        return is_strided and tensor.untyped_storage()._cdata not in self._known

    def _is_of_host(self, value: Any) -> bool:
        """Return whether a value is an offloaded tensor, or a host tensor computed from one."""
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return False
        known = self._known.get(value.untyped_storage()._cdata)
        if known is not None:
            return known.ledger is self.host_ledger
        return is_in_host_memory(value)

    def _see(self, tensor: torch.Tensor, ledger: Ledger) -> None:
        storage = tensor.untyped_storage()
        if self._scopes:
            guess = self._scopes[-1]
        else:
            guess = Account(Role.ACTIVATIONS, self._running[-1][1] if self._running else "")
        self._note(storage, guess, ledger, storage.nbytes())
        self._fresh.append(storage._cdata)

    def _book(self, tensor: torch.Tensor, account: Account, *, of_host: bool = False) -> None:
        """Book an existing tensor. An offloaded tensor moves to the host ledger."""
        local = plain_of(tensor)
        on_host = is_in_host_memory(local) or (of_host and local.device.type == "cpu")
        if not on_host and local.device != self.device:
            return
        storage = local.untyped_storage()
        known = self._known.get(storage._cdata)
        if known is None:
            ledger = self.host_ledger if on_host else self.ledger
            self._note(storage, account, ledger, storage.nbytes()).book()
        elif on_host:
            known.move(self.host_ledger, known.account)

    def _book_offloaded(self, account: Account) -> None:
        """Book all offloaded storages in the host ledger.

        Args:
            account: Account of the storages that are not tracked yet.
        """
        for storage in storages_in_host_memory():
            known = self._known.get(storage._cdata)
            if known is None:
                self._note(storage, account, self.host_ledger, storage.nbytes()).book()
            else:
                known.move(self.host_ledger, known.account)

    def _claim(self, storage: torch.UntypedStorage, account: Account, nbytes: int = 0) -> None:
        """Track the storage of a buffer, whose events book its bytes.

        A tracked storage is not booked again when an operation returns a view of it.
        """
        known = self._known.get(storage._cdata)
        if known is not None:
            self._forget(known)
        self._note(storage, account, self.ledger, nbytes).book()

    def _book_block(self, memory: torch.Tensor) -> None:
        """Book a block of the trace pool as idle. A live buffer reduces the idle bytes."""
        storage = memory.untyped_storage()
        known = self._known.get(storage._cdata)
        if known is None or known.account != _IDLE:
            self._claim(storage, _IDLE, storage.nbytes())

    def _note(
        self, storage: torch.UntypedStorage, account: Account, ledger: Ledger, nbytes: int
    ) -> _Known:
        """Track a storage until it is freed."""
        key = storage._cdata
        ref = weakref.ref(storage, lambda _: self._free(key))
        known = self._known[key] = _Known(ledger, account, nbytes, ref)
        return known

    def _free(self, key: int) -> None:
        self._settle()
        self._forget(self._known.pop(key))

    def _forget(self, known: _Known) -> None:
        known.unbook()
        self._resizable.discard(known)

    def _settle(self) -> None:
        """Book the outputs of the latest operation, whose accounts are known now."""
        for held in tuple(self._resizable):
            storage = held.ref()
            if storage is not None and storage.nbytes() < held.nbytes:
                held.ledger.remove(held.account, held.nbytes - storage.nbytes())
                held.nbytes = storage.nbytes()
        fresh, self._fresh = self._fresh, []
        for key in fresh:
            known = self._known.get(key)
            if known is None or known.is_booked:
                continue
            storage = known.ref()
            if storage is not None and is_storage_in_host_memory(storage):
                known.ledger = self.host_ledger
            known.book()
            if known.account.role is Role.COMMUNICATION:
                # A receive buffer is resized to zero before it is freed.
                self._resizable.add(known)
