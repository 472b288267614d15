"""Functions for ranks with quantized modules of Transformer Engine, without Megatron."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp_v2 import MixedPrecisionPolicy, checkpoint, fully_shard
from megatron_fsdp_v2.runtime import context
from megatron_fsdp_v2_mcore.formats import register_formats
from tests.distributed import wrapping
from tests.distributed.wrapping import record_collectives, step_all
from tests.mcore.session import enter_rehearsal

POLICY = MixedPrecisionPolicy(main_params_dtype=torch.float32, main_grads_dtype=torch.float32)
SIZES = (256, 384, 320)


def recipe_of(name: str) -> Any:
    """Return a recipe by its name in Megatron's `--fp8-recipe` or `--fp4-recipe`."""
    from transformer_engine.common import recipe

    made = {
        "delayed": recipe.DelayedScaling,
        "tensorwise": recipe.Float8CurrentScaling,
        "blockwise": recipe.Float8BlockScaling,
        "mxfp8": recipe.MXFP8BlockScaling,
        "nvfp4": recipe.NVFP4BlockScaling,
    }
    return made[name]()


def enter(recipe: str) -> Any:
    """Start a rehearsal that supports a recipe on this rank; return Transformer Engine."""
    flags = {"mxfp8": ["--fp8-recipe", recipe], "nvfp4": ["--fp4-format", "e2m1"]}
    enter_rehearsal("transformer_engine", flags.get(recipe, []))
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    assert register_formats()
    # Otherwise, maxima of modules of an earlier test would be reduced with those of this one.
    FP8GlobalStateManager.reset()
    return te


def real() -> Any:
    """Return the Transformer Engine that is installed for a GPU."""
    import transformer_engine.pytorch as te

    assert register_formats()
    return te


def layers(te: Any, recipe: str, *, quantized: bool = True, device: str = "cpu") -> nn.Sequential:
    """Return three linear layers; one height and one width are not multiples of 128."""
    torch.manual_seed(0)
    kept = {"preserve_high_precision_init_val": True} if quantized else {}
    same: dict[str, Any] = {"fuse_wgrad_accumulation": True, "params_dtype": torch.bfloat16}
    made = []
    with te.quantized_model_init(enabled=quantized, recipe=recipe_of(recipe), **kept):
        for inner, outer in itertools.pairwise((*SIZES, 128)):
            made.append(te.Linear(inner, outer, bias=outer != 320, device=device, **same))
    return nn.Sequential(*made)


def sharded(
    model: nn.Sequential,
    strategy: str,
    *,
    instances: int = 1,
    device: str = "cpu",
    outer: str = "optim",
    **options: Any,
) -> nn.Sequential:
    """Shard every layer and the model; `outer` is the strategy over several instances."""
    inner = dist.get_world_size() // instances
    if instances > 1:
        options["outer_dp_sharding_strategy"] = outer
    shape = (inner,) if instances == 1 else (instances, inner)
    mesh = wrapping.mesh_of(*shape) if device == "cpu" else init_device_mesh(device, shape)
    for layer in [*model, model]:
        fully_shard(layer, mesh=mesh, sharding_strategy=strategy, mp_policy=POLICY, **options)
    return model


def step(
    te: Any, model: nn.Sequential, recipe: str, seed: int = 0, device: str = "cpu"
) -> torch.Tensor:
    """Run forward and backward of this rank's batch; return the loss."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    inputs = torch.randn(32, SIZES[0], generator=generator).bfloat16().to(device)
    with te.autocast(enabled=True, recipe=recipe_of(recipe)):
        loss = model(inputs).float().square().mean()
    loss.backward()
    return loss.detach()


_ROWWISE = ("_rowwise_data", "_rowwise_scale_inv")
FIELDS = {
    "Float8Tensor": ("_data", "_scale_inv"),
    "Float8BlockwiseQTensor": _ROWWISE,
    "MXFP8Tensor": (*_ROWWISE, "_columnwise_data", "_columnwise_scale_inv"),
    "NVFP4Tensor": (*_ROWWISE, "_amax_rowwise"),
}


def differing_bytes(
    recipe: str,
    strategy: str,
    num_steps: int,
    instances: int = 1,
    device: str = "cpu",
    outer: str = "optim",
    folder: str = "",
) -> list[str]:
    """Train and gather; return the fields that differ from those of quantized full main weights.

    With a folder, a checkpoint of the last step is loaded after one more step and its forward.
    """
    te = enter(recipe) if device == "cpu" else real()
    model = layers(te, recipe, device=device)
    sharded(model, strategy, instances=instances, device=device, outer=outer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for seed in range(num_steps):
        step(te, model, recipe, seed, device)
        step_all(optimizer)
    if folder:
        checkpoint.save(folder, model)
        for seed in range(num_steps, num_steps + 2):
            step(te, model, recipe, seed, device)
            step_all(optimizer)
        with torch.no_grad(), te.autocast(enabled=True, recipe=recipe_of(recipe)):
            model(torch.ones(32, SIZES[0]).bfloat16())
        checkpoint.load(folder, model)
    whole = [layer.weight.detach().full_tensor() for layer in model]
    found = []
    for index, layer in enumerate(model):
        layer.unshard()
        weight: Any = layer.weight
        name = next(base.__name__ for base in type(weight).__mro__ if base.__name__ in FIELDS)
        quantizer = weight._quantizer.copy()
        quantizer.set_usage(rowwise=True, columnwise=True)
        if recipe == "delayed":
            # The weights were quantized with an earlier scale.
            quantizer.scale = weight._scale_inv.reciprocal().view(1)
            quantizer.amax = torch.zeros(1, device=device)
        expected = quantizer(whole[index].bfloat16())
        for field in FIELDS[name]:
            mine, theirs = getattr(weight, field), getattr(expected, field)
            if not torch.equal(*_without_padding(mine, theirs)):
                found.append(f"{index} {field}")
        layer.reshard()
    return found


def maxima_of_a_step(
    recipe: str, strategy: str, *, one_by_one: bool = False
) -> tuple[int, list[torch.Tensor]]:
    """Return the number of all-reduces of maxima in a forward after a step, and final weights.

    Args:
        recipe: Name of the recipe.
        strategy: Sharding strategy.
        one_by_one: Whether a unit's weights are quantized separately, when the unit is used.
    """
    te = enter(recipe)
    model = sharded(layers(te, recipe), strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    counts = []
    instead = (
        mock.patch.object(context, "write_stale_weights")
        if one_by_one
        else contextlib.nullcontext()
    )
    for seed in range(3):
        with instead, mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduced:
            step(te, model, recipe, seed)
        counts.append(
            sum(call.kwargs.get("op") == dist.ReduceOp.MAX for call in reduced.mock_calls)
        )
        step_all(optimizer)
    return counts[-1], [param.detach().full_tensor() for param in model.parameters()]


def _without_padding(mine: torch.Tensor, theirs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Remove the zero padding of block scales, which depends on how a weight was quantized."""
    if mine.dim() < 2:
        return mine.reshape(-1), theirs.reshape(-1)
    rows, columns = (min(pair) for pair in zip(mine.shape, theirs.shape, strict=True))
    used = int((theirs != 0).any(0).sum()) if theirs.dtype == torch.float32 else columns
    columns = min(columns, used)
    return mine[:rows, :columns], theirs[:rows, :columns]


def gathered_bytes(recipe: str) -> list[tuple[int, int]]:
    """Return the bytes gathered in a forward and a backward, of quantized and of bf16 weights."""
    te = enter(recipe)
    found = []
    for quantized in (True, False):
        model = sharded(layers(te, recipe, quantized=quantized), "optim_grads_params")
        step(te, model, recipe)
        wire = record_collectives(model)
        inputs = torch.randn(32, SIZES[0]).bfloat16()
        with te.autocast(enabled=True, recipe=recipe_of(recipe)):
            loss = model(inputs).float().square().mean()
        forward = wire.nbytes("all_gather")
        loss.backward()
        found.append((forward, wire.nbytes("all_gather") - forward))
    return found
