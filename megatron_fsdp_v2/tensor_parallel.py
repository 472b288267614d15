"""Rules for tensor-parallel modules whose parameters are plain TP-local tensors.

PyTorch's `parallelize_module` creates DTensors with placements. Other modules hold a TP-local shard
as a plain parameter; `tensor_shards` looks up their class in a table of rules and describes every
parameter for `UnitOptions(tensor_shards=...)`. A table is a sequence of rules; add a rule for each
custom class.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from megatron_fsdp_v2.dtensor.row_shards import TensorShard

__all__ = [
    "COLUMN",
    "NORM_RULES",
    "REPLICATED",
    "ROW",
    "VOCABULARY",
    "FusedShard",
    "PlacementPatterns",
    "TensorParallelRule",
    "TensorPlacement",
    "tensor_shard_by_rules",
    "tensor_shards",
]


@dataclass(frozen=True, slots=True)
class FusedShard:
    """Several fused matrices in one parameter, each sharded separately.

    The TP-local shard of a gated layer contains a shard of the gate and a shard of the up
    projection: `FusedShard(-2, 2)`. With `Shard(-2)`, a checkpoint loaded at another size would mix
    up their rows.

    Attributes:
        dim: Dimension along which the matrices are concatenated and sharded; may be negative.
        num_pieces: Number of equally sized matrices.
    """

    dim: int
    num_pieces: int


type TensorPlacement = Placement | FusedShard
"""Placement of a parameter along the tensor-parallel axis."""

type PlacementPatterns = Mapping[str, TensorPlacement]
"""Placements by shell-style pattern of parameter names; the first match applies."""

# Dimensions count from the last, so that they also apply to stacked weights, such as experts'
# matrices of shape (experts, out, in).
COLUMN: PlacementPatterns = {"weight*": Shard(-2), "bias*": Shard(-1)}
"""A column-parallel linear layer: weight `(..., out, in)`, bias `(..., out)`."""

ROW: PlacementPatterns = {"weight*": Shard(-1), "bias*": Replicate()}
"""A row-parallel linear layer; its bias is replicated and added after the sum."""

VOCABULARY: PlacementPatterns = {"weight": Shard(-2)}
"""A vocabulary-parallel embedding: weight `(words, hidden)`."""

REPLICATED: PlacementPatterns = {"*": Replicate()}
"""A replicated module, such as a norm or a router."""


@dataclass(frozen=True, slots=True)
class TensorParallelRule:
    """Tensor-parallel placements of the parameters of one class of modules.

    Attributes:
        module: The class, including its subclasses; or its import path, such as
            `"transformer_engine.pytorch.LayerNormLinear"`, which is not imported.
        placements: Placements by parameter name; or a function of the module that returns them, if
            they depend on options of the module.
    """

    module: type[nn.Module] | str
    placements: PlacementPatterns | Callable[[nn.Module], PlacementPatterns]

    def __post_init__(self) -> None:
        """Validate `module`.

        Raises:
            ValueError: `module` is neither a class of modules nor an import path.
        """
        path = self.module.split(".") if isinstance(self.module, str) else []
        is_path = len(path) > 1 and all(part.isidentifier() for part in path)
        is_class = isinstance(self.module, type) and issubclass(self.module, nn.Module)
        if not (is_path or is_class):
            raise ValueError(
                "module of a TensorParallelRule must be a subclass of nn.Module or an import path "
                f"such as 'package.Class', got {self.module!r}"
            )

    def matches(self, module: nn.Module) -> bool:
        """Whether a module is of this rule's class."""
        if isinstance(self.module, type):
            return isinstance(module, self.module)
        # If the package was never imported, no module of its classes exists.
        package, _, name = self.module.rpartition(".")
        known = getattr(sys.modules.get(package), name, None)
        return isinstance(known, type) and isinstance(module, known)

    def find_placement(self, module: nn.Module, name: str) -> TensorPlacement | None:
        """Return the placement of a module's parameter; None if no pattern matches its name."""
        placements = self.placements(module) if callable(self.placements) else self.placements
        return next(
            (placement for pattern, placement in placements.items() if fnmatchcase(name, pattern)),
            None,
        )


NORM_RULES: tuple[TensorParallelRule, ...] = (
    TensorParallelRule(nn.LayerNorm, REPLICATED),
    TensorParallelRule(nn.RMSNorm, REPLICATED),
)
"""Rules for PyTorch's norms. Its linear layers may be column- or row-parallel."""


def tensor_shards(
    module: nn.Module, *, mesh: DeviceMesh, rules: Sequence[TensorParallelRule]
) -> dict[nn.Parameter, TensorShard]:
    """Describe the tensor-parallel sharding of all parameters of a module and its submodules.

    The first rule that matches a module applies. DTensors and already sharded parameters are
    skipped, as are absent biases. The function does not communicate.

    Args:
        module: A module whose parameters are this rank's TP-local shards.
        mesh: Data-parallel axes, outermost first, then the tensor-parallel axis.
        rules: The table.

    Returns:
        The `tensor_shards` of `UnitOptions`, for a `fully_shard` over the data-parallel axes.

    Raises:
        ValueError: No rule matches a parameter, or a rule does not fit its shape.
    """
    if not isinstance(mesh, DeviceMesh) or mesh.ndim < 2:
        raise ValueError(
            "mesh must have the data-parallel axes and then the tensor-parallel axis, such as "
            f"init_device_mesh(device, (dp, tp), mesh_dim_names=('dp', 'tp')), got {mesh}"
        )
    found: dict[nn.Parameter, TensorShard] = {}
    for prefix, below in module.named_modules():
        for name, param in below.named_parameters(recurse=False):
            if isinstance(param, DTensor):
                continue
            shard = tensor_shard_by_rules(below, name, param, rules, mesh, prefix)
            if found.setdefault(param, shard) != shard:
                raise ValueError(
                    f"parameter {prefix}.{name} is tied to a parameter that another rule shards "
                    "differently; use the same placements for both modules"
                )
    return found


def tensor_shard_by_rules(
    module: nn.Module,
    name: str,
    param: torch.Tensor,
    rules: Sequence[TensorParallelRule],
    mesh: DeviceMesh | None,
    prefix: str = "",
) -> TensorShard:
    """Describe one parameter by the first rule that matches its module.

    Args:
        module: The module on which the parameter is registered.
        name: Name of the parameter in the module.
        param: This rank's TP-local shard.
        rules: The table.
        mesh: As in `tensor_shards`; None without a tensor-parallel axis.
        prefix: Name of the module, for errors.

    Raises:
        ValueError: No rule matches the parameter, or the rule does not fit its shape.
    """
    where = f"parameter {prefix}.{name}" if prefix else f"parameter {name}"
    where += f" of shape {tuple(param.shape)} of {type(module).__name__}"
    rule = next((rule for rule in rules if rule.matches(module)), None)
    placement = None if rule is None else rule.find_placement(module, name)
    if placement is None:
        why = "no rule matches its module" if rule is None else f"{rule} has no pattern for it"
        raise ValueError(
            f"the tensor-parallel placement of {where} is unknown: {why}; add a rule such as "
            f"TensorParallelRule({type(module).__name__}, REPLICATED) before the other rules"
        )
    if type(placement) is Replicate:
        return TensorShard(mesh, None)
    if not (type(placement) is Shard or isinstance(placement, FusedShard)):
        raise ValueError(f"{where} cannot be {placement}; use Shard, Replicate or FusedShard")
    if not -param.ndim <= placement.dim < param.ndim:
        raise ValueError(f"{where} has no dimension {placement.dim}, which {placement} shards")
    dim = placement.dim % param.ndim
    pieces: tuple[int, ...] = ()
    if isinstance(placement, FusedShard):
        length, count = param.shape[dim], placement.num_pieces
        if count < 1 or length % count:
            raise ValueError(
                f"{where} cannot be divided into {count} equal matrices by {placement}"
            )
        pieces = (length // count,) * count
    return TensorShard(mesh, dim, pieces)
