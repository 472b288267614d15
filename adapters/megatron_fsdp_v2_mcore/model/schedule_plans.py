"""Gathers and reductions of units under Megatron's schedule plans, which run layers in parts.

With `--overlap-moe-expert-parallel-comm` a layer is a sequence of nodes: the computation before
dispatch, dispatch, experts, combine. Forward nodes of one micro-batch run between backward nodes of
another, so that the computation of one micro-batch overlaps with the all-to-all of the other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from megatron_fsdp_v2 import FSDPModule
from megatron_fsdp_v2_mcore.model.scheduled_units import ScheduledUnits


def scheduled_modules(chunk: nn.Module) -> list[nn.Module]:
    """Return the units of a sharded chunk that a plan has nodes for: layers and separate experts.

    Args:
        chunk: The model chunk.
    """
    layers = [module for module in chunk.modules() if isinstance(module, TransformerLayer)]
    parts = [part for layer in layers for part in (layer, _experts_of(layer))]
    return [part for part in parts if part is not None and _is_unit(part)]


def _is_unit(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule)


def _experts_of(layer: nn.Module) -> nn.Module | None:
    """Return the experts of a layer if they are a unit."""
    mlp = getattr(layer, "mlp", None)
    experts: nn.Module | None = mlp.experts if isinstance(mlp, BaseMoELayer) else None
    return experts if experts is not None and _is_unit(experts) else None


def attach_to_plan(plan: Any, units: ScheduledUnits) -> None:
    """Gather and reduce units when the nodes of a plan run.

    Args:
        plan: A plan that Megatron built for one micro-batch.
        units: The units of the plan's chunk.
    """
    _wrap_function(plan.pre_process, "forward_func", before=units.begin)
    _wrap_function(plan.pre_process, "backward_func", after=units.end)
    if plan.post_process is not None:
        # The final norm runs with the last combine node, on the stream of the all-to-all.
        _wrap_function(plan.post_process, "backward_func", before=units.expect_gradients)
    for index in range(plan.num_layers()):
        _attach_layer(plan.get_layer(index), units)


def _attach_layer(nodes: Any, units: ScheduledUnits) -> None:
    """Gather and reduce a layer's units. All other parameters stay gathered for the whole plan.

    Dispatch and combine run on another stream and use no parameters of a layer. A layer's weights
    are therefore allocated and freed on the stream of all other nodes.
    """

    def attach(part: nn.Module, last_forward: Any, first_backward: Any, first: Any) -> None:
        """Gather a unit before the forward of `first`; reduce it after the backward of `first`."""
        _wrap_function(first, "forward_func", before=partial(units.begin_forward, part))
        last_forward.set_post_forward_hook(partial(units.end_forward, part))
        _wrap_function(first_backward, "backward_func", before=partial(units.begin_backward, part))
        # Megatron calls this hook after delayed weight gradients are computed.
        first.set_post_backward_hook(partial(units.end_backward, part))

    layer = getattr(nodes.layer, "mtp_model_layer", nodes.layer)
    before, mlp = nodes.pre_dispatch_computation, nodes.mlp
    experts = _experts_of(layer)
    if experts is not None:
        attach(experts, mlp, mlp, mlp)
    if not _is_unit(layer):
        return
    if experts is None:
        attach(layer, mlp, mlp, before)
    else:
        # A recomputation starts when a gradient reaches the output of the experts.
        attach(layer, before, mlp if layer.recompute_pre_mlp_layernorm else before, before)


def _wrap_function(
    node: Any,
    name: str,
    *,
    before: Callable[[], None] | None = None,
    after: Callable[[], None] | None = None,
) -> None:
    """Call functions before and after the function that a node of a plan runs."""
    run = getattr(node, name)

    def run_with_callbacks(*args: Any) -> Any:
        if before is not None:
            before()
        result = run(*args)
        if after is not None:
            after()
        return result

    setattr(node, name, run_with_callbacks)
