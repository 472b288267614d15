"""Books the storages of a sharded model's step in a ledger as they are allocated and freed.

There are three sources. Resting tensors are known from the parameter groups. Events of the root's
observer tell when temporary buffers gain and lose memory. Everything else is the output of an
operation of torch, and is free when nothing refers to its storage any more.
"""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, override

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_fsdp_v2.diagnostics.memory_ledger import Account, Ledger, Role
from megatron_fsdp_v2.diagnostics.walk import parameters_below, units_below
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

if TYPE_CHECKING:
    from megatron_fsdp_v2.params.group import ParameterGroup

__all__ = ["MemoryWatch"]

_ROLES = {
    BufferUse.GATHERED: Role.GATHERED,
    BufferUse.GRADIENT: Role.GRAD_BUFFER,
    BufferUse.COMMUNICATION: Role.COMMUNICATION,
}


_IDLE = Account(Role.POOL, "")


@dataclass(slots=True)
class _Known:
    """A storage that is booked.

    Attributes:
        ledger: In which ledger.
        account: Where; None until something tells, with the next operation at the latest.
        nbytes: Its size when it was first seen.
        guess: Where it is booked unless it turns out to be something else.
        ref: Tells when it is free.
    """

    ledger: Ledger
    account: Account | None
    nbytes: int
    guess: Account
    ref: weakref.ref[torch.UntypedStorage]


class MemoryWatch(TorchDispatchMode):
    """Books the memory of a sharded module on its device, while entered.

    Args:
        module: The root.
        optimizer: What steps it, if its memory is to be told from that of activations.
        ledger: Where to book.
        host_ledger: Where to book what is offloaded to host memory, and what is made of it there.

    Attributes:
        ledger: Likewise.
        host_ledger: Likewise.
        device: Whose memory is looked at.
        accumulates: Whether a forward began with gradients that were not synchronized.
        has_gradients: Whether a forward began with main gradients that were set.
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
            raise ValueError(f"{type(module).__name__} has no parameters that are sharded")
        self.device = devices[0]
        self.accumulates = self.has_gradients = False
        self._known: dict[int, _Known] = {}
        self._fresh: list[int] = []
        self._resizable: dict[int, _Known] = {}
        self._running: list[tuple[str, str]] = []
        self._scopes: list[Account] = []
        # Names of units, by what events call them and their groups.
        self._names: dict[str, str] = {}
        self._accounts: dict[TemporaryBuffer, Account] = {}
        self._undo = contextlib.ExitStack()

    # -- beginning and end ----------------------------------------------------------------------

    @override
    def __enter__(self) -> MemoryWatch:
        context = self._units[0][1].context
        if isinstance(context.allocator, TracePoolAllocator):
            for block in context.allocator.blocks():
                self.book_block(block)
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
        self.settle()
        self._undo.close()
        self._known.clear()
        self._accounts.clear()

    def _watch_group(self, name: str, group: ParameterGroup) -> None:
        self._book(group.main_weight.tensor, Account(Role.MAIN_WEIGHT, name))
        self._book(group.model_weight.tensor, Account(Role.MODEL_WEIGHT, name))
        temporaries = [*group.weights.temporaries().values()]
        if group.grads is not None:
            if group.grads.main is not None:
                self._book(group.grads.main.tensor, Account(Role.MAIN_GRAD, name))
            temporaries += group.grads.temporaries().values()
        for buffer in temporaries:
            account = self._accounts[buffer] = Account(_ROLES[buffer.use], name)
            self.claim(buffer.tensor.untyped_storage(), account)
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
            self.settle()
            self._move_offloaded()
            self._book_state(optimizer, account)
            self._book_offloaded(account)
            self._scopes.remove(account)
            self.ledger.enter("after the step", "")

        self._undo.callback(optimizer.register_step_pre_hook(begin).remove)
        self._undo.callback(optimizer.register_step_post_hook(end).remove)

    def _book_state(self, optimizer: torch.optim.Optimizer, account: Account) -> None:
        """State that is not booked yet; that of an offloaded parameter is offloaded with it."""
        for param, state in optimizer.state.items():
            of_host = isinstance(param, torch.Tensor) and is_in_host_memory(_local_of(param))
            for value in tree_leaves(state):
                if not isinstance(value, torch.Tensor):
                    continue
                known = self._known.get(_local_of(value).untyped_storage()._cdata)
                if known is None:
                    self._book(value, account, of_host=of_host)
                elif of_host and value.device.type == "cpu":
                    self._move(known)

    # -- what is going on -----------------------------------------------------------------------

    def _receive(self, event: Event) -> None:
        match event:
            case BufferAcquired(buffer) if buffer in self._accounts:
                self._book_buffer(buffer)
            case BufferReleasing(buffer) if buffer in self._accounts:
                self.ledger.remove(self._accounts[buffer], buffer.tensor.nbytes)
                if buffer.pool_memory is not None:
                    self.ledger.add(_IDLE, buffer.tensor.nbytes)
            case MainGradientAllocated(buffer, flat) if buffer in self._accounts:
                self._main_has_memory(Account(Role.MAIN_GRAD, self._accounts[buffer].unit), flat)
            case PhaseBegan(owner, phase) if owner in self._names:
                self._begin_phase(self._names[owner], phase)
            case PhaseEnded(owner, phase) if owner in self._names:
                self._end_phase(self._names[owner], phase)

    def _begin_phase(self, name: str, phase: str) -> None:
        """A phase of a unit begins: what is made inside belongs to communication."""
        direction, begins, _ = _PHASES.get(phase, ("", False, False))
        if begins:
            if not name and direction == "forward":
                self._running.clear()
                self.accumulates |= self._units[0][1].context.has_unreduced
                self.has_gradients |= any(
                    group.grads is not None and group.grads.main is not None
                    for _, unit in self._units
                    for group in unit.groups
                )
            self._running.append((direction, name))
            self.ledger.enter(direction, name)
        self._scopes.append(Account(Role.COMMUNICATION, name))

    def _end_phase(self, name: str, phase: str) -> None:
        self.settle()
        self._scopes.pop()
        direction, _, ends = _PHASES.get(phase, ("", False, False))
        if ends and (direction, name) in self._running:
            self._running.remove((direction, name))
            self.ledger.enter(*(self._running[-1] if self._running else (direction, "")))

    def _book_buffer(self, buffer: TemporaryBuffer) -> None:
        """A temporary buffer has memory."""
        # What was freed for it is not to be counted beside it.
        self.settle()
        if buffer.pool_memory is not None:
            self.book_block(buffer.pool_memory)
            self.ledger.remove(_IDLE, buffer.tensor.nbytes)
        self.ledger.add(self._accounts[buffer], buffer.tensor.nbytes)
        # An allocator may put it somewhere else every time.
        self.claim(buffer.tensor.untyped_storage(), self._accounts[buffer])

    # -- storages -------------------------------------------------------------------------------

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            # What they hold comes by in the operations they are made of.
            return NotImplemented
        self.settle()
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
        """Whether something is a tensor that is offloaded, or was made of one on the host."""
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
        self._note(storage, guess, storage.nbytes(), is_settled=False, ledger=ledger)
        self._fresh.append(storage._cdata)

    def _book(self, tensor: torch.Tensor, account: Account, *, of_host: bool = False) -> None:
        """A tensor that is there already."""
        local = _local_of(tensor)
        storage = local.untyped_storage()
        on_host = is_in_host_memory(local) or (of_host and local.device.type == "cpu")
        if (on_host or local.device == self.device) and storage._cdata not in self._known:
            ledger = self.host_ledger if on_host else self.ledger
            self._note(storage, account, storage.nbytes(), ledger=ledger)
            ledger.add(account, storage.nbytes())

    def _book_offloaded(self, account: Account) -> None:
        """Everything that is known as offloaded and not booked yet."""
        for storage in storages_in_host_memory():
            if storage._cdata not in self._known:
                self._note(storage, account, storage.nbytes(), ledger=self.host_ledger)
                self.host_ledger.add(account, storage.nbytes())

    def _move_offloaded(self) -> None:
        """Book in the other ledger what became known as offloaded after it was made."""
        for known in self._known.values():
            storage = known.ref()
            if storage is not None and is_storage_in_host_memory(storage):
                self._move(known)

    def _move(self, known: _Known) -> None:
        if known.account is not None and known.ledger is not self.host_ledger:
            known.ledger.remove(known.account, known.nbytes)
            known.ledger = self.host_ledger
            known.ledger.add(known.account, known.nbytes)

    def _main_has_memory(self, account: Account, flat: torch.Tensor) -> None:
        """A main gradient was given memory, by the operation that was seen last."""
        known = self._known[flat.untyped_storage()._cdata]
        known.guess = account
        self.settle()
        if known.account is not None and known.account != account:
            known.ledger.remove(known.account, known.nbytes)
            known.account = account
            known.ledger.add(account, known.nbytes)

    def claim(self, storage: torch.UntypedStorage, account: Account) -> None:
        """Operations put out views of a buffer's storage, which the buffer itself books."""
        known = self._known.get(storage._cdata)
        if known is not None and known.account is not None:
            known.ledger.remove(known.account, known.nbytes)
        if known is None or known.account is None or known.nbytes:
            self._note(storage, account, 0)

    def book_block(self, memory: torch.Tensor) -> None:
        """Memory that buffers are parts of: what is of no buffer that lives is idle."""
        storage = memory.untyped_storage()
        known = self._known.get(storage._cdata)
        if known is not None and known.account == _IDLE:
            return
        self.claim(storage, _IDLE)
        self._known[storage._cdata].nbytes = storage.nbytes()
        self.ledger.add(_IDLE, storage.nbytes())

    def _note(
        self,
        storage: torch.UntypedStorage,
        account: Account,
        nbytes: int,
        *,
        is_settled: bool = True,
        ledger: Ledger | None = None,
    ) -> None:
        key = storage._cdata
        # Weak, or what is freed after the watch would find it alive.
        watch = weakref.ref(self)

        def freed(ref: weakref.ref[torch.UntypedStorage]) -> None:
            watching = watch()
            if watching is not None:
                watching._freed(key, ref)

        self._known[key] = _Known(
            ledger or self.ledger,
            account if is_settled else None,
            nbytes,
            account,
            weakref.ref(storage, freed),
        )

    def _freed(self, key: int, ref: weakref.ref[torch.UntypedStorage]) -> None:
        known = self._known.get(key)
        if known is None or known.ref is not ref:
            return
        self.settle()
        del self._known[key]
        self._resizable.pop(key, None)
        if known.account is not None:
            known.ledger.remove(known.account, known.nbytes)

    def settle(self) -> None:
        """Book what the last operation made, now that it has got where it belongs."""
        for held in list(self._resizable.values()):
            storage = held.ref()
            if storage is not None and storage.nbytes() < held.nbytes:
                held.ledger.remove(held.guess, held.nbytes - storage.nbytes())
                held.nbytes = storage.nbytes()
        fresh, self._fresh = self._fresh, []
        if not fresh:
            return
        for key in fresh:
            known = self._known.get(key)
            if known is not None and known.account is None:
                storage = known.ref()
                if storage is not None and is_storage_in_host_memory(storage):
                    known.ledger = self.host_ledger
                known.account = known.guess
                known.ledger.add(known.account, known.nbytes)
                if known.account.role is Role.COMMUNICATION:
                    # Emptied by hand when it was received, and freed some time later.
                    self._resizable[key] = known


def _local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


_PHASES = {
    "pre_forward": ("forward", True, False),
    "post_forward": ("forward", False, True),
    "pre_backward": ("backward", True, False),
    "post_backward": ("backward", False, True),
}
"""Direction, and whether the unit begins or ends with it."""
