"""Global names of parameters and buffers in a checkpoint, independent of the parallel sizes.

A pipeline stage numbers its layers from 0, and an expert-parallel rank its experts. A checkpoint
with such local numbers would silently load into the wrong layers at other sizes. Here names are
those of the model on a single rank, so that they are equal on all ranks of all runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from torch import Tensor, nn

from megatron_fsdp_v2_mcore.checkpoint.name_table import EXPERT_TENSOR_NAME
from megatron_fsdp_v2_mcore.model.tensor_shards import PIECES_ATTRIBUTE

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"

Renaming = Callable[[str], str]
"""Function from a name below a module to the global name."""


@dataclass(frozen=True, slots=True)
class CanonicalName:
    """The name of a parameter or buffer in a checkpoint.

    Attributes:
        fqn: Name in the model on a single rank, with global numbers of layers and experts.
        pieces: Suffixes of the sub-tensors of a fused parameter, which are saved separately.
        is_copy: Whether an earlier pipeline stage holds and saves the same parameter.
        is_unused: Whether Megatron creates the parameter and does not use it. It is neither saved
            nor loaded.
    """

    fqn: str
    pieces: tuple[str, ...] = ()
    is_copy: bool = False
    is_unused: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the saved tensors, in the order of `pieces`."""
        return tuple(self.fqn + piece for piece in self.pieces) or (self.fqn,)


def canonical_names(chunks: Sequence[nn.Module]) -> list[dict[str, CanonicalName]]:
    """Name the parameters and buffers of model chunks.

    Args:
        chunks: All model chunks of this rank, sharded or not, wrapped or not.

    Returns:
        Per chunk, a mapping from local names (of `named_parameters`, `state_dict`) to names in a
        checkpoint. A parameter that is registered twice has one name; non-persistent buffers have
        no name.

    Raises:
        RuntimeError: Two parameters would have the same name, or the experts in one stacked
            parameter cannot be named.
    """
    owners: dict[str, int] = {}
    found = []
    for chunk in chunks:
        named: dict[str, CanonicalName] = {}
        seen: dict[int, CanonicalName] = {}
        unused = _unused_output_weights(chunk)
        for local, fqn, tensor in _tensors(chunk):
            key = id(tensor)
            name = seen.setdefault(key, _canonical_name(fqn, tensor, is_unused=key in unused))
            if owners.setdefault(name.fqn, key) != key:
                raise RuntimeError(
                    f"{local} and another parameter of this rank would both have the name "
                    f"{name.fqn} in a checkpoint; give every layer a different layer_number"
                )
            named[local] = name
        found.append(named)
    return found


def canonical_parameter_names(chunks: Sequence[nn.Module]) -> dict[nn.Parameter, CanonicalName]:
    """Return the names in a checkpoint of all parameters of this rank's model chunks.

    Args:
        chunks: As in `canonical_names`.
    """
    return {
        param: named[local]
        for chunk, named in zip(chunks, canonical_names(chunks), strict=True)
        for local, param in chunk.named_parameters()
    }


def canonical_modules(chunks: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, Renaming]]:
    """Yield each module of model chunks once, with the function from its names to global names.

    Args:
        chunks: As in `canonical_names`.
    """
    seen: set[int] = set()
    for chunk in chunks:
        for _, module, to_global in _walk(chunk, "", lambda rest: rest):
            if id(module) not in seen:
                seen.add(id(module))
                yield module, to_global


def _unused_output_weights(chunk: nn.Module) -> set[int]:
    """Return the ids of unused output weights: their stages use a replica of the embedding."""
    return {
        id(module.output_layer.weight)
        for module in chunk.modules()
        if isinstance(module, LanguageModule)
        and module.share_embeddings_and_output_weights
        and getattr(module, "mtp_process", False)
        and module.post_process
    }


def _canonical_name(fqn: str, tensor: Tensor, *, is_unused: bool) -> CanonicalName:
    pieces = tuple(getattr(tensor, PIECES_ATTRIBUTE, ()))
    name = CanonicalName(fqn, pieces, is_unused=is_unused)
    if not getattr(tensor, "shared", False):
        return name
    owner = fqn.removesuffix(OUTPUT).removesuffix(EMBEDDING)
    return replace(name, fqn=owner + EMBEDDING, is_copy=True)


def _tensors(chunk: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Yield local names, global names and tensors below a chunk, in the order of a state dict."""
    for local, module, to_global in _walk(chunk, "", lambda rest: rest):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and name not in module._non_persistent_buffers_set:
                yield local + name, to_global(name), tensor


def _walk(
    module: nn.Module, local: str, to_global: Renaming
) -> Iterator[tuple[str, nn.Module, Renaming]]:
    """Yield prefixes of local names, modules, and functions to global names, parents first."""
    yield local, module, to_global
    for name, child in module._modules.items():
        if child is not None:
            below = to_global if name == "module" else _compose(to_global, module, name, child)
            yield from _walk(child, f"{local}{name}.", below)


def _compose(to_global: Renaming, module: nn.Module, name: str, child: nn.Module) -> Renaming:
    to_parent = _renaming_to_parent(module, name, child)
    return lambda rest: to_global(to_parent(rest))


def _renaming_to_parent(module: nn.Module, name: str, child: nn.Module) -> Renaming:
    """Return the function from names below a child to names below its parent."""
    if name == "layers" and isinstance(child, nn.ModuleList):
        numbers = [getattr(layer, "layer_number", None) for layer in child]
        return lambda rest: f"layers.{_renumber(rest, numbers, first=1)}"
    if isinstance(module, SequentialMLP) and name == "local_experts":
        first = _first_expert(module)
        experts: list[int | None] = [first + n for n in range(module.num_local_experts)]
        return lambda rest: f"local_experts.{_renumber(rest, experts, first=0)}"
    if isinstance(module, TEGroupedMLP) and name in ("linear_fc1", "linear_fc2"):
        first = _first_expert(module)
        is_expert_parallel = module.ep_group.size() > 1
        return lambda rest: (
            f"{name}.{_global_expert_name(rest, first, is_expert_parallel=is_expert_parallel)}"
        )
    return lambda rest: f"{name}.{rest}"


def _renumber(rest: str, numbers: Sequence[int | None], first: int) -> str:
    index, _, below = rest.partition(".")
    number = numbers[int(index)]
    return rest if number is None else f"{number - first}.{below}"


def _first_expert(experts: Any) -> int:
    return int(experts.ep_group.rank() * experts.num_local_experts)


def _global_expert_name(name: str, first: int, *, is_expert_parallel: bool) -> str:
    match = EXPERT_TENSOR_NAME.fullmatch(name)
    if match is not None:
        return f"{match[1]}{first + int(match[2])}"
    if is_expert_parallel and name in ("weight", "bias"):
        raise RuntimeError(
            "a checkpoint needs one parameter for each expert: experts in one stacked parameter "
            "cannot be saved with expert parallelism; set moe_single_grouped_weight and "
            "moe_single_grouped_bias to False"
        )
    return name
