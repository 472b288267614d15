"""The weight format of tensors with FSDP2's all-gather extension.

A tensor subclass may define what is gathered of it, and what modules compute with:

- `fsdp_pre_all_gather(mesh[, size, stride, module, mp_policy])` of this rank's rows returns the
  tensors to gather, and metadata that are equal on all ranks;
- `fsdp_post_all_gather(gathered, metadata, dtype, out=None)` returns the tensor to compute with and
  the tensors whose memory it uses; with `out` it updates the former.

FSDP2 calls both for every gather. Here the first one is called when weights changed, for all
weights one after the other, because it may communicate.
"""

from __future__ import annotations

import functools
import inspect
import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, override

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakIdKeyDictionary

from megatron_fsdp_v2.comm.interface import Axis
from megatron_fsdp_v2.dtensor.sharded_rows import plain_parts
from megatron_fsdp_v2.layout.mixed_precision import GroupDtypes
from megatron_fsdp_v2.layout.placement import AxisPlacements, Placement
from megatron_fsdp_v2.layout.weight_use import WeightUse
from megatron_fsdp_v2.params.buffer import DataParallelBuffer, GroupSpec
from megatron_fsdp_v2.params.formats import GroupWrite, WeightFormat, register_format

_METHODS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


def extension_problem(param: torch.Tensor) -> str | None:
    """Return why a tensor with the extension cannot be sharded, as a clause, or None."""
    kind = type(param)
    if not all(hasattr(kind, name) for name in _METHODS):
        return f"its class does not define both {_METHODS[0]} and {_METHODS[1]}"
    if not is_traceable_wrapper_subclass(param):
        return "it has no __tensor_flatten__, which is needed to make one of this rank's rows"
    if param.is_meta:
        return "it is on the meta device"
    names, context = param.__tensor_flatten__()
    inner = [getattr(param, name) for name in names]
    if len(inner) != 1 or inner[0].shape != param.shape or inner[0].dtype != param.dtype:
        held = ", ".join(f"{name} {tuple(t.shape)}" for name, t in zip(names, inner, strict=True))
        return f"it consists of other tensors than one of its own shape and dtype: {held}"
    try:
        made = _made_of(kind, names[0], context, inner[0].detach())
    except Exception as error:
        return f"its __tensor_unflatten__ fails: {error}"
    if type(made) is not kind:
        return f"its __tensor_unflatten__ returns a {type(made).__name__}"
    num_arguments = _num_arguments(param)
    if num_arguments not in (1, 5):
        return (
            f"{_METHODS[0]} has {num_arguments} arguments, where FSDP2 passes the mesh, or the "
            "mesh, the size, the stride, the module and the precision policy"
        )
    return None


def _made_of(kind: Any, name: str, context: Any, rows: torch.Tensor) -> Any:
    """Return a tensor of a subclass over some rows."""
    return kind.__tensor_unflatten__({name: rows}, context, rows.shape, rows.stride())


def _num_arguments(tensor: Any) -> int:
    return len(inspect.signature(tensor.fsdp_pre_all_gather).parameters)


@dataclass(eq=False)
class Extension:
    """The extension of one parameter.

    Attributes:
        label: Name of the parameter for errors.
        make: Returns a tensor of the parameter's class over plain rows.
        module: The module that registers the parameter.
        mesh: Ranks over which the innermost axis shards the parameter.
        shape: Shape of the parameter.
        policy: Dtypes, as FSDP2 describes them.
        rows: The tensor over this rank's rows of the last `before_gather`.
        metadata: What it returned for `after_gather`.
        is_current: Whether the tensor that modules compute with has these metadata, and memory.
        memory: Storages of that tensor other than those of gathered tensors, with their bytes.
    """

    label: str
    make: Callable[[torch.Tensor], Any]
    module: weakref.ref[nn.Module]
    mesh: DeviceMesh
    shape: torch.Size
    policy: MixedPrecisionPolicy
    rows: Any = None
    metadata: Any = None
    is_current: bool = False
    memory: Sequence[tuple[torch.UntypedStorage, int]] = ()

    @torch.no_grad()
    def before_gather(self, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return what is gathered of some rows. Collective if the extension communicates.

        Args:
            rows: Plain rows of the main weight. If there are none, a row of zeros takes part in the
                collectives of other ranks.

        Raises:
            ValueError: The results do not have the shape of the rows, or differ in dtype.
        """
        used = rows if len(rows) else rows.new_zeros(1, *rows.shape[1:])
        self.rows = self.make(used)
        arguments: tuple[Any, ...] = (self.mesh,)
        if _num_arguments(self.rows) > 1:
            stride = torch.empty(self.shape, device="meta").stride()
            arguments += (self.shape, stride, self.module(), self.policy)
        outputs, self.metadata = self.rows.fsdp_pre_all_gather(*arguments)
        self.is_current = False
        outputs = (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)
        shapes, dtypes = ({*map(operator.attrgetter(a), outputs)} for a in ("shape", "dtype"))
        if shapes != {used.shape} or len(dtypes) != 1:
            found = ", ".join(f"{tuple(each.shape)} of {each.dtype}" for each in outputs)
            raise ValueError(
                f"fsdp_pre_all_gather of {self.label} returns tensors of shapes {found} for rows "
                f"of shape {tuple(used.shape)}; they must have this shape, without padding, and "
                "one dtype"
            )
        return [output[: len(rows)] for output in outputs]

    @torch.no_grad()
    def after_gather(self, gathered: Sequence[torch.Tensor], out: torch.Tensor | None) -> Any:
        """Return the tensor that modules compute with, or update it.

        Args:
            gathered: Whole tensors, of the shape of the parameter.
            out: The tensor to update; None in the first call.
        """
        for storage, nbytes in self.memory:
            storage.resize_(nbytes)
        self.is_current = True
        method, dtype = self.rows.fsdp_post_all_gather, self.policy.param_dtype
        if out is not None:
            method(tuple(gathered), self.metadata, dtype, out=out)
            return None
        made, used = method(tuple(gathered), self.metadata, dtype)
        ours = {tensor.untyped_storage()._cdata for tensor in gathered}
        others = [tensor.untyped_storage() for tensor in used]
        self.memory = [(each, each.nbytes()) for each in others if each._cdata not in ours]
        # It is the whole parameter, which is dropped once its rows are in the main weight.
        self.rows = None
        return made

    def free(self) -> None:
        """Free the memory of the tensor that modules compute with, except gathered tensors."""
        self.is_current = False
        for storage, _ in self.memory:
            storage.resize_(0)


_PROBED = WeakIdKeyDictionary()
"""Extensions by original parameter, from `probe` until a format binds the parameter."""


class AllGatherExtensionFormat(WeightFormat):
    """Weights whose class defines what is gathered of rows, and what modules compute with.

    `probe` derives the format of a parameter, which knows what `fsdp_pre_all_gather` returns.
    """

    communicates: ClassVar[bool] = True
    prepares: ClassVar[bool] = True
    gathered_dtype: ClassVar[torch.dtype]

    def __init__(self, dtypes: GroupDtypes) -> None:
        del dtypes
        self.payload_dtype = self.gathered_dtype
        self._extensions: list[Extension] = []
        # Views of the gathered buffers, which follow these to other memory.
        self._views: list[Sequence[torch.Tensor]] = []
        self._params: Sequence[torch.Tensor] = ()

    @staticmethod
    @override
    def takes(param: torch.Tensor) -> bool:
        """Return whether a parameter has the extension, in a form that can be sharded."""
        return hasattr(param, _METHODS[0]) and extension_problem(param) is None

    @staticmethod
    @override
    def problem(dtypes: GroupDtypes, placements: Sequence[AxisPlacements]) -> str | None:
        """Reject main weights sharded along two axes, since an extension is given one axis."""
        del dtypes
        if len(placements) > 1 and placements[0].main_weight is Placement.SHARD:
            return (
                "fsdp_pre_all_gather communicates along one axis of the mesh, and main weights are "
                "sharded along two; use outer_dp_sharding_strategy='no_shard'"
            )
        return None

    @staticmethod
    @override
    def values(param: torch.Tensor) -> torch.Tensor:
        """Return the plain tensor that the parameter consists of."""
        (name,), _ = param.__tensor_flatten__()  # type: ignore[attr-defined]
        return getattr(param, name).detach()  # type: ignore[no-any-return]

    @override
    def bind(self, views: Sequence[torch.Tensor], index: int, like: torch.Tensor) -> torch.Tensor:
        extension: Extension = _PROBED.pop(like)  # type: ignore[no-untyped-call]
        self._extensions.append(extension)
        self._views.append(views)
        # The method may read gathered tensors, which have no memory between uses.
        storages = [view.untyped_storage() for view in views]
        nbytes = [storage.nbytes() for storage in storages]
        for view, storage in zip(views, storages, strict=True):
            storage.resize_(max(storage.nbytes(), _end_of(view)))
        try:
            return extension.after_gather(views, None)  # type: ignore[no-any-return]
        finally:
            if 0 in nbytes:
                extension.free()
            for storage, before in zip(storages, nbytes, strict=True):
                storage.resize_(before)

    @override
    def memory(self, bound: torch.Tensor, index: int) -> Sequence[torch.Tensor]:
        """Return the tensors that alias gathered ones.

        Raises:
            ValueError: The tensor that modules compute with has several aliases of one.
        """
        found = []
        for view in self._views[index]:
            memory = view.untyped_storage()._cdata
            same = [each for each in plain_parts(bound) if each.untyped_storage()._cdata == memory]
            if len(same) > 1:
                raise ValueError(
                    f"fsdp_post_all_gather of {self._extensions[index].label} returns a tensor "
                    f"that consists of {len(same)} views of one gathered tensor, which could not "
                    "follow it to other memory; return one view"
                )
            found.append(same[0] if same else view)
        return found

    @override
    def adopt(self, params: Sequence[torch.Tensor]) -> None:
        self._params = params
        self._views = [self.memory(param, index) for index, param in enumerate(params)]

    @override
    def prepare(self, uses: WeightUse) -> None:
        del uses
        found = zip(self._extensions, self._views, self._params, strict=True)
        for extension, views, param in found:
            if not extension.is_current:
                extension.after_gather(views, param)

    @override
    def forget(self) -> None:
        for extension in self._extensions:
            extension.free()

    @classmethod
    @override
    def write(cls, parts: Sequence[GroupWrite[Self]], axes: Sequence[Axis]) -> None:
        """Write what `fsdp_pre_all_gather` returns for this rank's rows of every weight."""
        del axes
        for part in parts:
            main = part.main
            targets = [DataParallelBuffer(main.context, main.placements, p) for p in part.payloads]
            for index, extension in enumerate(part.format._extensions):
                outputs = extension.before_gather(main.view(index))
                for target, output in zip(targets, outputs, strict=True):
                    target.view(index).copy_(output)


def _end_of(view: torch.Tensor) -> int:
    """Return the bytes of a storage up to the end of a contiguous view of it."""
    return int((view.storage_offset() + view.numel()) * view.element_size())


def probe(
    label: str, param: torch.Tensor, spec: GroupSpec, module: nn.Module, device: torch.device
) -> type[WeightFormat]:
    """Call `fsdp_pre_all_gather` of a whole parameter, and return the format of what it returns.

    Collective if the extension communicates.

    Args:
        label: Name of the parameter for errors.
        param: The parameter, which `AllGatherExtensionFormat` takes.
        spec: Properties of its group.
        module: The module that registers it.
        device: Device of its shards.

    Raises:
        ValueError: The method returns tensors that cannot be gathered as rows.
    """
    (name,), context = param.__tensor_flatten__()  # type: ignore[attr-defined]
    mesh, dtypes = spec.mesh, spec.dtypes
    if mesh.ndim > 1:
        mesh = DeviceMesh.from_group(mesh.get_group(mesh.ndim - 1), mesh.device_type)
    extension = Extension(
        label=label,
        make=functools.partial(_made_of, type(param), name, context),
        module=weakref.ref(module),
        mesh=mesh,
        shape=param.shape,
        policy=MixedPrecisionPolicy(dtypes.model_weight, dtypes.grad_comm),
    )
    values = AllGatherExtensionFormat.values(param)
    outputs = extension.before_gather(values.to(device, dtypes.main_weight))
    _PROBED[param] = extension
    return _format_of(type(param), outputs[0].dtype, len(outputs), frozenset(vars(extension.rows)))


@functools.cache
def _format_of(
    kind: type, dtype: torch.dtype, num_outputs: int, own_attributes: frozenset[str]
) -> type[WeightFormat]:
    """Return the format of tensors of a class, whose rows are gathered as several of one dtype."""
    members = {
        "__module__": __name__,
        "__doc__": f"Weights that {kind.__qualname__} gathers.",
        "gathered_dtype": dtype,
        "itemsize": staticmethod(lambda dtypes: dtype.itemsize),
        "own_attributes": own_attributes,
        "payloads": {f"gathered_{index}": WeightUse.BOTH for index in range(num_outputs)},
    }
    return type(f"{kind.__name__}Format", (AllGatherExtensionFormat,), members)


register_format(AllGatherExtensionFormat)
