"""torchtitan: the trainer shards with this package instead of FSDP2.

    import megatron_fsdp_v2_for.torchtitan

    megatron_fsdp_v2_for.torchtitan.install(sharding_strategy="optim_grads_params")
    torchtitan.train.main()

Experiments that have their own copy of the call continue to use FSDP2, except for the backend of
transformers' models. So does flux in torchtitan 0.2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from megatron_fsdp_v2.optim import Muon
from megatron_fsdp_v2_for.adapter import Adapter
from megatron_fsdp_v2_patching import Patch

__all__ = ["PATCHES", "install", "uninstall"]

_patch = functools.partial(Patch, reason="torchtitan imports FSDP2's function by name")
_options = functools.partial(_patch, wrap="megatron_fsdp_v2_for.adapter:with_options")
_annotated = functools.partial(_patch, wrap="megatron_fsdp_v2_for.spmd_annotations:with_shards")
PATCHES = {
    "0.2": (
        _options("torchtitan.models.llama3.infra.parallelize:fully_shard"),
        # Also the function of qwen3, deepseek_v3 and gpt_oss.
        _options("torchtitan.models.llama4.infra.parallelize:fully_shard"),
    ),
    "0.3": (
        Patch(
            "torchtitan.models.common.decoder:Decoder.parallelize",
            reason="torchtitan ties weights after it shards them",
            wrap="megatron_fsdp_v2_for.torchtitan:ties_before",
            parameters=("self", "parallel_dims"),
        ),
        Patch(
            "torchtitan.components.optimizer.optimizer:build_dist_muon",
            reason="DistMuon assumes that every rank has equally many rows of a parameter",
            wrap="megatron_fsdp_v2_for.torchtitan:builds_muon",
            parameters=("params",),
        ),
        Patch(
            "torchtitan.distributed.utils:get_spmd_context",
            reason="types of gathered parameters are those of FSDP2's",
            wrap="megatron_fsdp_v2_for.torchtitan:rejects_typechecking",
            parameters=("parallel_dims", "spmd_typechecking"),
        ),
        _annotated("torchtitan.distributed.fsdp:fully_shard"),
        # These modules need transformers.
        Patch(
            "torchtitan.experiments.transformers_modeling_backend.parallelize:apply_fsdp",
            reason="torchtitan ties weights after it shards them",
            wrap="megatron_fsdp_v2_for.torchtitan:ties_words_before",
            parameters=("model",),
            optional=True,
        ),
        _annotated("torchtitan.models.flux.parallelize:fully_shard", optional=True),
        _annotated(
            "torchtitan.experiments.transformers_modeling_backend.parallelize:fully_shard",
            optional=True,
        ),
    ),
}
"""Patches by version of torchtitan."""

_ADAPTER = Adapter("torchtitan", PATCHES)
install, uninstall = _ADAPTER.install, _ADAPTER.uninstall


def ties_before(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the method that replaces a decoder's parameters, which ties the new ones.

    The decoder's initialization does so again, after its modules were sharded.
    """

    def parallelize(self: Any, parallel_dims: Any) -> None:
        original(self, parallel_dims)
        if self.enable_weight_tying:
            self.tok_embeddings.weight = self.lm_head.weight

    return parallelize


def ties_words_before(
    original: Callable[..., Any], options: Mapping[str, Any]
) -> Callable[..., Any]:
    """Return the function that shards a model of transformers, which ties its weights before.

    torchtitan unties them for FSDP2, and its initialization ties them again.
    """

    def apply(model: Any, *args: Any, **kwargs: Any) -> Any:
        # A pipeline stage may lack one of them.
        parts = model.tok_embeddings, model.lm_head
        if all(getattr(part, "weight", None) is not None for part in parts):
            model.model.tie_weights()
        return original(model, *args, **kwargs)

    return apply


def rejects_typechecking(
    original: Callable[..., Any], options: Mapping[str, Any]
) -> Callable[..., Any]:
    """Wrap the function that makes the context of a step; reject type checks."""

    def make(*, parallel_dims: Any = None, spmd_typechecking: bool = False) -> Any:
        if spmd_typechecking:
            raise ValueError(
                "debug.spmd_typechecking checks types with FSDP2 only; set it to False, or check "
                "the same job with FSDP2, after megatron_fsdp_v2_for.torchtitan.uninstall()"
            )
        return original(parallel_dims=parallel_dims)

    return make


def builds_muon(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the function that builds this package's `Muon` in place of DistMuon.

    Of the layouts that DistMuon computes in, blocks of rows alone change the result: the others
    select the rank that computes a whole matrix.
    """

    def build(
        params: Iterable[dict[str, Any]],
        *,
        compute_sharding_by_fqn: Mapping[str, Any],
        bucket_configs: object,
        **kwargs: Any,
    ) -> Muon:
        groups: list[dict[str, Any]] = []
        for group in params:
            members: dict[int | None, list[tuple[str, Any]]] = {}
            for name, param in zip(group["param_names"], group["params"], strict=True):
                rows = _block_rows(name, param, compute_sharding_by_fqn)
                members.setdefault(rows, []).append((name, param))
            for rows, pairs in members.items():
                names, chosen = map(list, zip(*pairs, strict=True))
                part = {"params": chosen, "param_names": names, "block_rows": rows}
                groups.append({**group, **part})
        return Muon(groups, **kwargs)

    return build


def _block_rows(name: str, param: torch.Tensor, layouts: Mapping[str, Any]) -> int | None:
    """Return the rows of each block that is orthogonalized on its own; None for whole matrices."""
    if name not in layouts:
        raise ValueError(f"parameter {name} has no layout in compute_sharding_by_fqn")
    shards = layouts[name].shardings_by_mesh_axis.values()
    blocks = {shard for shard in shards if hasattr(shard, "block_size")}
    sizes = {block.block_size for block in blocks}
    if len(sizes) > 1 or any(param.ndim != 2 or block.dim not in (0, -2) for block in blocks):
        raise ValueError(
            f"parameter {name} of shape {tuple(param.shape)} has the layouts {blocks}; a "
            "BlockShard splits the rows of a matrix, in one size along all axes of the mesh"
        )
    return next(iter(sizes), None)
