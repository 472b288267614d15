"""Tensor-parallel modules of plain tensors: a table of rules says how their parameters are cut.

Modules that PyTorch's `parallelize_module` made say it themselves. Others hold a rank's part as a
plain parameter; `tensor_shards` looks their class up in a table and describes every parameter, for
`fully_shard(..., tensor_shards=...)`. A table is a sequence of rules; a module of one's own takes
one more row.
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
    "Cut",
    "Cuts",
    "FusedShard",
    "TensorParallelRule",
    "cut_of",
    "tensor_shards",
]


@dataclass(frozen=True, slots=True)
class FusedShard:
    """Several matrices in one parameter, one after the other, each cut by itself.

    A gated layer's part holds half a gate and half an up projection: `FusedShard(-2, 2)`. Said to
    be one matrix, its halves would be mixed up in a checkpoint loaded at another size.

    Attributes:
        dim: Dimension that is cut and that the matrices follow one another along; may be negative.
        num_pieces: How many equally long matrices there are.
    """

    dim: int
    num_pieces: int


type Cut = Placement | FusedShard
"""`Shard(dim)`, `Replicate()` or a `FusedShard`: where a parameter is along the tensor axis."""

type Cuts = Mapping[str, Cut]
"""Patterns of parameter names, as in file names, and how what they match is cut; first match."""

# Dimensions count from the last one, so that they hold for stacked weights as well: experts'
# matrices of shape (experts, out, in) are cut one dimension further on.
COLUMN: Cuts = {"weight*": Shard(-2), "bias*": Shard(-1)}
"""A linear layer whose outputs are cut: weight `(..., out, in)`, bias `(..., out)`."""

ROW: Cuts = {"weight*": Shard(-1), "bias*": Replicate()}
"""A linear layer whose inputs are cut; its bias is added once, after the sum."""

VOCABULARY: Cuts = {"weight": Shard(-2)}
"""An embedding whose words are cut: weight `(words, hidden)`."""

REPLICATED: Cuts = {"*": Replicate()}
"""A module that every rank holds in full: norms, routers."""


@dataclass(frozen=True, slots=True)
class TensorParallelRule:
    """How the parameters of one class of modules are cut.

    Attributes:
        module: The class, subclasses included; or its import path, such as
            `"transformer_engine.pytorch.LayerNormLinear"`, which imports nothing.
        cuts: By parameter name; or a function of the module that returns them, where options of
            the module decide.
    """

    module: type[nn.Module] | str
    cuts: Cuts | Callable[[nn.Module], Cuts]

    def __post_init__(self) -> None:
        """Reject what can match no module.

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
        # Who never imported a package has no module of its classes.
        package, _, name = self.module.rpartition(".")
        known = getattr(sys.modules.get(package), name, None)
        return isinstance(known, type) and isinstance(module, known)

    def find_cut(self, module: nn.Module, name: str) -> Cut | None:
        """How a module's parameter of a name is cut; None where the rule does not say."""
        cuts = self.cuts(module) if callable(self.cuts) else self.cuts
        return next((cut for pattern, cut in cuts.items() if fnmatchcase(name, pattern)), None)


NORM_RULES: tuple[TensorParallelRule, ...] = (
    TensorParallelRule(nn.LayerNorm, REPLICATED),
    TensorParallelRule(nn.RMSNorm, REPLICATED),
)
"""PyTorch's norms. Its linear layers do not tell whether they are column- or row-parallel."""


def tensor_shards(
    module: nn.Module,
    *,
    mesh: DeviceMesh,
    rules: Sequence[TensorParallelRule],
) -> dict[nn.Parameter, TensorShard]:
    """Describe how tensor parallelism cut the parameters at and below a module.

    The first rule that matches a module decides. Parameters that are DTensors, and those sharded
    already, are left out. Nothing becomes a parameter that is none: an absent bias stays absent.
    No communication.

    Args:
        module: A module whose parameters are this rank's parts.
        mesh: Data-parallel axes, outermost first, then the tensor-parallel axis.
        rules: The table.

    Returns:
        What `fully_shard(module, mesh=<the data-parallel axes>, tensor_shards=...)` takes.

    Raises:
        ValueError: No rule says how a parameter is cut, or a rule does not fit one.
    """
    if not isinstance(mesh, DeviceMesh) or mesh.ndim < 2:
        raise ValueError(
            "mesh must have the data-parallel axes and then the tensor-parallel one, such as "
            f"init_device_mesh(device, (dp, tp), mesh_dim_names=('dp', 'tp')), got {mesh}"
        )
    found: dict[nn.Parameter, TensorShard] = {}
    for prefix, below in module.named_modules():
        for name, param in below.named_parameters(recurse=False):
            if isinstance(param, DTensor):
                continue
            shard = cut_of(below, name, param, rules, mesh, prefix)
            if found.setdefault(param, shard) != shard:
                raise ValueError(
                    f"parameter {prefix}.{name} is tied to one that another rule cuts differently; "
                    "give both modules the same cuts"
                )
    return found


def cut_of(
    module: nn.Module,
    name: str,
    param: torch.Tensor,
    rules: Sequence[TensorParallelRule],
    mesh: DeviceMesh | None,
    prefix: str = "",
) -> TensorShard:
    """Describe one parameter by the first rule that matches its module.

    Args:
        module: The module it is registered on.
        name: Its name there.
        param: This rank's part.
        rules: The table.
        mesh: As `tensor_shards` takes it; None where no tensor-parallel axis is.
        prefix: Name of the module, for errors.

    Raises:
        ValueError: No rule says how it is cut, or the rule does not fit it.
    """
    where = f"parameter {prefix}.{name}" if prefix else f"parameter {name}"
    where += f" of shape {tuple(param.shape)} of {type(module).__name__}"
    rule = _rule_of(module, rules)
    cut = None if rule is None else rule.find_cut(module, name)
    if cut is None:
        why = "no rule matches its module" if rule is None else f"{rule} has no pattern for it"
        raise ValueError(
            f"nothing says how tensor parallelism cuts {where}: {why}; add a row such as "
            f"TensorParallelRule({type(module).__name__}, REPLICATED) in front of the table"
        )
    if type(cut) is Replicate:
        return TensorShard(mesh, None)
    if not (type(cut) is Shard or isinstance(cut, FusedShard)):
        raise ValueError(f"{where} cannot be {cut}; use Shard, Replicate or FusedShard")
    if not -param.ndim <= cut.dim < param.ndim:
        raise ValueError(f"{where} has no dimension {cut.dim} that {cut} could cut")
    dim = cut.dim % param.ndim
    return TensorShard(mesh, dim, _pieces(where, cut, param.shape[dim]))


def _rule_of(module: nn.Module, rules: Sequence[TensorParallelRule]) -> TensorParallelRule | None:
    return next((rule for rule in rules if rule.matches(module)), None)


def _pieces(where: str, cut: Cut, length: int) -> tuple[int, ...]:
    if not isinstance(cut, FusedShard):
        return ()
    if cut.num_pieces < 1 or length % cut.num_pieces:
        raise ValueError(f"{where} does not fall into {cut.num_pieces} equal pieces as {cut} says")
    return (length // cut.num_pieces,) * cut.num_pieces
