"""Operations of a simulated step: their times and the memory of their results."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from typing import Any, override

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from benchmarks.sim.costs import COPY_IN, RooflineCosts
from megatron_fsdp_v2.plan.simulation import Device

__all__ = ["LiveBytes", "Operations"]

MOST_COMPUTED = 1 << 20
"""Bytes of arguments up to which an operation is computed."""

_aten = torch.ops.aten
_UNSEEN = frozenset({"prim", "c10d", "profiler"})
_FACTORIES = frozenset({_aten.empty, _aten.empty_strided, _aten.empty_like, _aten.new_empty})
_ITEMS = (_aten._local_scalar_dense, _aten.equal, _aten.is_nonzero)


class LiveBytes:
    """Live bytes of storages that operations allocated, and their peak.

    Attributes:
        now: Live bytes.
        peak: The most live bytes since `begin`.
    """

    def __init__(self) -> None:
        self.now = 0
        self.peak = 0
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], list[int]]] = {}
        self._may_change: set[int] = set()

    def begin(self) -> None:
        """Reset the peak."""
        self.look_again()
        self.peak = self.now

    def see(self, tensor: torch.Tensor, *, may_change: bool = False) -> None:
        """Count the storage of a result.

        Args:
            tensor: The result.
            may_change: Whether its storage may be resized.
        """
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        held = [0]

        def forget(ref: weakref.ref[torch.UntypedStorage]) -> None:
            known = self._known.get(key)
            if known is not None and known[0] is ref:
                del self._known[key]
                self._may_change.discard(key)
                self.now -= held[0]

        self._known[key] = weakref.ref(storage, forget), held
        if may_change:
            self._may_change.add(key)
        self.look_again()
        self._change(held, storage.nbytes())

    def look_again(self) -> None:
        """Count storages that were resized."""
        for key in tuple(self._may_change):
            ref, held = self._known[key]
            storage = ref()
            if storage is not None and storage.nbytes() != held[0]:
                self._change(held, storage.nbytes())

    def _change(self, held: list[int], nbytes: int) -> None:
        self.now += nbytes - held[0]
        held[0] = nbytes
        self.peak = max(self.peak, self.now)


class Operations(TorchDispatchMode):
    """Runs every operation of torch on a simulated device, and counts live bytes.

    Large operations are not computed: their results are virtual memory that is never written, so
    that a CPU runs models that exceed its memory and speed. Small operations are computed, since
    programs read their results.

    Args:
        device: Simulated device, on which operations take time.
        costs: Cost model of operations.

    Attributes:
        live: Counter of live bytes.
        seconds_of: Seconds by name of operation, for reports.
    """

    def __init__(self, device: Device, costs: RooflineCosts) -> None:
        super().__init__()
        self.live = LiveBytes()
        self.seconds_of: dict[str, float] = {}
        self._device = device
        self._costs = costs
        self._without: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            # DTensor operations dispatch again with the local tensors.
            return NotImplemented
        kwargs = kwargs or {}
        if func.namespace in _UNSEEN or func.is_view:
            return func(*args, **kwargs)
        given = [*_tensors((args, kwargs))]
        if any(isinstance(tensor, FakeTensor) for tensor in given):
            # Shape propagation, which takes no time.
            return func(*args, **kwargs)
        result = self._run(func, args, kwargs, given)
        if func.overloadpacket in _ITEMS:
            return result
        before = {id(tensor) for tensor in given}
        for made in _tensors(result):
            if isinstance(made, FakeTensor) or made.device.type == "meta":
                return result
            if id(made) not in before:
                self.live.see(made, may_change=func.overloadpacket in _FACTORIES)
        seconds = self._costs.seconds(func, args, kwargs, result)
        if seconds:
            name = str(func.overloadpacket)
            self.seconds_of[name] = self.seconds_of.get(name, 0.0) + seconds
            self._device.compute(seconds)
        return result

    def _run(self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> Any:
        packet = func.overloadpacket
        is_structural = torch.Tag.inplace_view in func.tags or packet in _SHAPES
        # COPY_IN copies into a view that it creates and returns.
        is_structural |= func.name() == COPY_IN
        if is_structural or any(t.device.type == "meta" for t in given):
            return func(*args, **kwargs)
        if packet in _FACTORIES:
            made = func(*args, **kwargs)
            if made.nbytes > MOST_COMPUTED:
                self._forget_values(made)
            return made
        is_small = sum(tensor.nbytes for tensor in given) <= MOST_COMPUTED
        if is_small and all(map(self._knows, given)) and (given or _is_small_factory(args)):
            return func(*args, **kwargs)
        if packet in _ITEMS:
            # Assume that no NaN was found and that all ranks agree.
            is_bool = given[0].dtype is torch.bool
            return packet is _aten.equal or (False if is_bool else 1)
        written = _written(func, args, kwargs)
        if not written:
            return self._without_values(func, args, kwargs, given)
        for tensor in _tensors(written):
            self._forget_values(tensor)
        return _returned(func, written)

    def _knows(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has computed values."""
        storage = tensor.untyped_storage()
        ref = self._without.get(storage._cdata)
        return ref is None or ref() is not storage

    def _forget_values(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._without[storage._cdata] = weakref.ref(storage)

    def _without_values(self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> Any:
        """Allocate the results; an operation on meta tensors determines their shapes."""
        device = given[0].device if given else torch.device(kwargs.get("device") or "cpu")
        if device.type == "meta":
            return func(*args, **kwargs)
        on_meta = tree_map_only(torch.Tensor, _as_meta, (args, dict(kwargs)))
        if "device" in kwargs or not given:
            on_meta[1]["device"] = torch.device("meta")
        result = func(*on_meta[0], **on_meta[1])
        if "device" in kwargs and kwargs["device"] is not None:
            device = torch.device(kwargs["device"])
        return tree_map_only(torch.Tensor, lambda like: self._allocated(like, device), result)

    def _allocated(self, like: torch.Tensor, device: torch.device) -> torch.Tensor:
        made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
        self._forget_values(made)
        return made


_SHAPES = frozenset({_aten.set_, _aten.resize_, _aten.detach, _aten.alias, _aten.lift_fresh})


def _is_small_factory(args: Any) -> bool:
    """Whether a factory's result is small."""
    shape = args[0] if args and isinstance(args[0], (list, tuple)) else ()
    return math.prod(shape) * 8 <= MOST_COMPUTED


def _as_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in tree_leaves(values):
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            yield value


def _written(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments that an operation writes, by their alias names in its schema."""
    written: dict[str, Any] = {}
    for position, argument in enumerate(func._schema.arguments):
        alias = argument.alias_info
        if alias is None or not alias.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        written[next(iter(alias.before_set), argument.name)] = value
    return written


def _returned(func: Any, written: dict[str, Any]) -> Any:
    """Return the result of an operation that writes its arguments: some of them, or None.

    Raises:
        RuntimeError: The operation also returns new tensors.
    """
    returned = []
    for result in func._schema.returns:
        if result.alias_info is None:
            raise RuntimeError(
                f"{func} writes to its arguments and also returns new tensors, which cannot be "
                "simulated without values; leave it out of the model"
            )
        returned.append(written[next(iter(result.alias_info.before_set))])
    if not returned:
        return None
    return returned[0] if len(returned) == 1 else tuple(returned)
