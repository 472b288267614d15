"""What PyTorch's FSDP2 expects of a module that is an instance of its `FSDPModule`.

Libraries ask `isinstance(module, torch.distributed.fsdp.FSDPModule)` before they treat a module as
sharded, and so does torch in pipelining and in `register_fsdp_forward_method`. Deriving from that
class brings its methods along; those that reach into FSDP2's own state are replaced here, where
`runtime/fsdp_module.py` has nothing of the same meaning, by an error that says what to use.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self, cast, override

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem

from megatron_fsdp_v2.runtime.hooks import begin_method, end_method
from megatron_fsdp_v2.runtime.other_wrappers import check_who_asks

if TYPE_CHECKING:
    from megatron_fsdp_v2.runtime.unit import Unit

# Looked up once: programs put ours in the place of theirs, for libraries that import it when they
# shard a model.
_THEIR_FUNCTION = fsdp.fully_shard.__wrapped__  # type: ignore[attr-defined]

__all__ = ["REFUSED_METHODS", "TorchFSDPModule", "UnitState", "show_state"]

REFUSED_METHODS = {
    "set_all_reduce_hook": "give fully_shard a 2-D mesh, which all-reduces along its outer axis; a "
    "DTensor's gradient may be changed between backward and step",
    "set_allocate_memory_from_process_group_for_comm": "buffers come from torch's allocator, or "
    "with fully_shard(enable_trace_pool=True) from one block of memory",
    "set_custom_all_gather": "collectives are those of the mesh's process groups",
    "set_custom_reduce_scatter": "collectives are those of the mesh's process groups",
    "set_keep_unsharded_storage": "fully_shard(enable_trace_pool=True) gathers weights at the same "
    "addresses in every step",
    "set_symm_mem_for_comm": "buffers come from torch's allocator",
    "_set_unshard_async_op": "set_modules_to_forward_prefetch says what is gathered ahead",
}
"""Methods of FSDP2, of any version, that a sharded module here does not have, and what it has."""


class TorchFSDPModule(fsdp.FSDPModule):
    """The base that makes a sharded module an instance of torch's `FSDPModule`."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Build a module of the class that was sharded, not a sharded one.

        Containers make others of their own class, such as a slice of an `nn.Sequential`.
        """
        classes = cls.__mro__
        original = classes[classes.index(fsdp.FSDPModule) + 1]
        # Python calls __init__ of what it gets only where that is of the class it asked for.
        return cast(Self, original(*args, **kwargs))

    @override
    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        unit = self._fsdp_unit  # type: ignore[attr-defined]
        unit.reshard()
        _check_conversion(unit, fn)
        # Changed parameters are noticed where the unit is gathered next.
        return super(fsdp.FSDPModule, self)._apply(fn, recurse)  # type: ignore[misc]

    # Other wrappers find parameters through these two.
    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        """See `torch.nn.Module`; rejects wrappers that would communicate what is sharded here.

        Raises:
            RuntimeError: Such a wrapper asks.
        """
        check_who_asks(self)
        return super().named_modules(*args, **kwargs)  # type: ignore[misc]

    def named_children(self) -> Any:
        """See `named_modules`.

        Raises:
            RuntimeError: Such a wrapper asks.
        """
        check_who_asks(self)
        return super().named_children()  # type: ignore[misc]

    @override
    def _get_fsdp_state(self) -> Any:
        return UnitState(self)


def _check_conversion(unit: Unit, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Before a module is converted (`half()`, `to()`): see that its parameters stay what they are.

    Raises:
        ValueError: They would get another dtype or device.
    """
    for group in unit.groups:
        main = group.main_weight.tensor
        with torch.no_grad():
            becomes = convert(torch.empty(0, dtype=main.dtype, device=main.device))
        if becomes.dtype != main.dtype:
            raise ValueError(
                f"the parameters of unit {unit.name} are {main.dtype} and cannot become "
                f"{becomes.dtype} once they are sharded: convert the model before fully_shard, or "
                "set the dtype to compute with by mp_policy=MixedPrecisionPolicy(param_dtype=...)"
            )
        if becomes.device != main.device:
            raise ValueError(
                f"the parameters of unit {unit.name} stay on {main.device}, where their mesh is, "
                f"and cannot move to {becomes.device}: save a state dict and load it into a model "
                "that is sharded there"
            )


def _rejected(name: str, instead: str) -> Callable[..., Any]:
    def reject(self: Any, *args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        raise RuntimeError(
            f"{type(self).__name__} was sharded by megatron_fsdp_v2, which has no {name}: {instead}"
        )

    reject.__name__ = name
    reject.__doc__ = f"Reject: {instead}.\n\n        Raises:\n            RuntimeError: Always."
    return reject


for _name, _instead in REFUSED_METHODS.items():
    setattr(TorchFSDPModule, _name, _rejected(_name, _instead))


class UnitState:
    """A sharded module as the parts of torch see it that ask for FSDP2's own state of it.

    Those are `register_fsdp_forward_method`, `share_comm_ctx` (all models on a device share their
    streams, so what it sets has no effect) and `torch.distributed.pipelining`.
    """

    def __init__(self, module: Any) -> None:
        # It is kept in the module.
        self._module: Callable[[], Any] = weakref.ref(module)
        # Of no unit would torch's pipelining run the end of a backward by itself.
        self._state_ctx = types.SimpleNamespace(all_states=())
        self._comm_ctx: Any = None
        # It has none of FSDP2's groups, one in some versions and several in others.
        self._fsdp_param_group = None
        self._fsdp_param_groups: Sequence[Any] = ()

    def __getattr__(self, name: str) -> Any:
        """Reject whatever else FSDP2 keeps.

        Raises:
            AttributeError: Always.
        """
        raise AttributeError(
            f"a module that megatron_fsdp_v2 sharded has no {name!r} of FSDP2's internals; what "
            "asks for it works on torch's fully_shard alone"
        )

    def _pre_forward(self, module: Any, args: Any, kwargs: Any) -> Any:
        return begin_method(module, sys._getframe(1), args, kwargs)

    def _post_forward(self, module: Any, args: Any, output: Any) -> Any:
        del args
        return end_method(module, sys._getframe(1), output)

    def _root_post_backward_final_callback(self) -> None:
        """After the last backward of a pipeline's stage: bring gradients into `param.grad`."""
        module = self._module()
        if module is None:
            return
        module.reduce_grad()
        for part in module.modules():
            if isinstance(part, TorchFSDPModule):
                part.reshard()


def show_state(module: nn.Module) -> None:
    """Have `torch.distributed.fsdp.fully_shard.state(module)` find something.

    Torch's `fully_shard` rejects a module that has a state, so nothing is sharded twice; its
    `replicate` leaves alone what is registered under this name, and would take shards for whole
    parameters elsewhere.
    """
    states = module.__dict__.setdefault(STATE_KEY, {})
    states[_THEIR_FUNCTION] = UnitState(module)
    registered = module.__dict__.setdefault(REGISTRY_KEY, {})
    registered[_THEIR_FUNCTION.__name__] = RegistryItem()
