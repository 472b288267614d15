"""nemo-automodel: its Megatron-FSDP strategy shards with this package.

    import megatron_fsdp_v2_for.automodel

    megatron_fsdp_v2_for.automodel.install()

Call it before a recipe builds its model. `distributed.strategy` of the recipe is `megatron_fsdp`,
and its `zero_dp_strategy` selects the sharding unless `install` is given one.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megatron_fsdp_v2.dtensor.sharded_rows import ShardedRows, plain_of
from megatron_fsdp_v2_for import megatron_fsdp
from megatron_fsdp_v2_for.adapter import Adapter
from megatron_fsdp_v2_patching import Patch

__all__ = ["PATCHES", "install", "uninstall"]

_HERE = "megatron_fsdp_v2_for.automodel"
_patch = functools.partial(Patch, reason="automodel imports a name of megatron-fsdp")
_shard = functools.partial(_patch, wrap=f"{_HERE}:with_options")
_ROOM = "nemo_automodel.components.distributed"
PATCHES = {
    "0.7": (
        _shard(f"{_ROOM}.parallelizer:megatron_fsdp_fully_shard"),
        _shard(f"{_ROOM}.parallelizer:megatron_fsdp_fully_shard_model"),
        _patch(
            f"{_ROOM}.parallelizer:MegatronFSDPMixedPrecisionPolicy",
            replace="megatron_fsdp_v2_for.megatron_fsdp:MixedPrecisionPolicy",
        ),
        Patch(
            f"{_ROOM}.config:MegatronFSDPConfig.__init__",
            "Megatron-FSDP reduces gradients in every backward",
            wrap=f"{_HERE}:reduces_every_backward",
        ),
        Patch(
            f"{_ROOM}.tp_replicas:_iter_unique_parameters_by_name",
            "placements of rows that ranks hold unequally are not a key of a dict",
            wrap=f"{_HERE}:with_local_replicas",
            parameters=("model_parts",),
        ),
    ),
}
"""Patches by version of automodel."""

_ADAPTER = Adapter("nemo-automodel", PATCHES)
uninstall = _ADAPTER.uninstall


def install(sharding_strategy: str | None = None, **options: Any) -> None:
    """Make automodel shard with this package, in place of an earlier installation.

    Args:
        sharding_strategy: Replaces `zero_dp_strategy` of recipes. None: the recipes' own.
        options: Further arguments of `megatron_fsdp_v2_for.megatron_fsdp.fully_shard_model`.

    Raises:
        RuntimeError: See `Adapter.install`.
    """
    _ADAPTER.install(sharding_strategy, **options)


def with_options(original: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return this package's function of the same name, with arguments that automodel lacks.

    It returns the sharded model without its wrapper. Automodel reads attributes of models, and
    names weights in checkpoints, as if there was none: it would drop a model's own updates and
    settings silently, and export weights that no other program recognizes.
    """
    ours = getattr(megatron_fsdp, original.__name__)
    given = {name: value for name, value in options.items() if name != "sharding_strategy"}
    if options["sharding_strategy"] is not None:
        given["zero_dp_strategy"] = options["sharding_strategy"]

    @functools.wraps(ours)
    def shard(module: Any, *args: Any, **kwargs: Any) -> Any:
        # Tensor parallelism unties weights, and automodel ties them after it has sharded.
        importlib.import_module("nemo_automodel.shared.tied_weights").ensure_tied_lm_head(module)
        sharded = ours(module, *args, **{**kwargs, **given})
        model, *optimizer = sharded if isinstance(sharded, tuple) else (sharded,)
        # Called after the model is sharded, to register its sharded parameters.
        model.module._replace_param_with_distributed_if_needed = _is_done
        return (model.module, *optimizer) if optimizer else model.module

    return shard


def _is_done() -> None:
    pass


def reduces_every_backward(
    original: Callable[..., None], options: Mapping[str, Any]
) -> Callable[..., None]:
    """Return a constructor of the configuration with a field that recipes read of FSDP2's."""

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        # The default keeps whole gradients until the last micro-batch.
        self.defer_fsdp_grad_sync = False

    return init


def with_local_replicas(
    original: Callable[..., Iterator[tuple[Any, str]]], options: Mapping[str, Any]
) -> Callable[..., Iterator[tuple[Any, str]]]:
    """Return a generator of the parameters that tensor-parallel ranks keep equal.

    Of a sharded parameter it yields the local rows, with the local rows of the gradient, unless
    tensor parallelism splits the parameter.
    """

    def replicas(model_parts: Any) -> Iterator[tuple[Any, str]]:
        for param, reduction in original(model_parts):
            if not isinstance(param, ShardedRows):
                yield param, reduction
                continue
            tensor = param.row_shards.tensor
            if tensor is None or tensor.dim is None:
                rows = plain_of(param).detach().requires_grad_(param.requires_grad)
                rows.grad = None if param.grad is None else plain_of(param.grad)
                yield rows, reduction

    return replicas
