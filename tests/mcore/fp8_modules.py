"""What ranks do with the state of delayed scaling, with and without Megatron's training loop."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.mcore.checkpoint_values import _digest as digest
from tests.mcore.quantized import enter

__all__ = ["digest", "restore_damaged", "shapes_early_and_late", "state_digests"]


def state_digests(model: list[Any], optimizer: Any) -> dict[str, str]:
    """A digest of every tensor of that state that this rank has. A probe for `train`."""
    from megatron_fsdp_v2_mcore.checkpoint import fp8_state

    del optimizer
    return {tensor.name: digest(tensor.live) for tensor in fp8_state._tensors(model)}


def _recipe(**options: Any) -> Any:
    from transformer_engine.common.recipe import DelayedScaling

    return DelayedScaling(amax_history_len=7, **options)


def restore_damaged() -> list[str]:
    """Have what cannot be read on one rank put into a module; return what every rank is told."""
    te = enter("delayed")
    from megatron_fsdp_v2_mcore.checkpoint import fp8_state
    from megatron_fsdp_v2_mcore.flags.errors import FlagError
    from megatron_fsdp_v2_mcore.formats import delayed_scaling

    layer = te.Linear(16, 16, device="cpu")
    with torch.no_grad(), te.autocast(enabled=True, recipe=_recipe()):
        delayed_scaling.allocate(layer)
    before = {name: value.clone() for name, value in delayed_scaling.live_state(layer).items()}
    good = {name: value + 1 for name, value in fp8_state.wanted_tensors([layer]).items()}
    for value in good.values():
        value.fill_(2.0)
    messages = []
    for name, number in [
        ("scale_fwd", 0.0),
        ("scale_bwd", float("nan")),
        ("scale_fwd", float("inf")),
        ("amax_history_fwd", -1.0),
    ]:
        read = {key: value.clone() for key, value in good.items()}
        if dist.get_rank() == 0:
            read[f"fp8_state.{name}"].view(-1)[1] = number
        try:
            fp8_state.restore([layer], read)
        except FlagError as error:
            messages.append(str(error))
        state = delayed_scaling.live_state(layer)
        assert all(torch.equal(state[key], value) for key, value in before.items())
    fp8_state.restore([layer], good)
    assert all((value == 2).all() for value in delayed_scaling.live_state(layer).values())
    return messages


def shapes_early_and_late() -> tuple[dict[str, Any], dict[str, Any]]:
    """Shapes of the state of modules, made before a forward and by one."""
    te = enter("delayed")
    from megatron_fsdp_v2_mcore.formats import delayed_scaling

    def made() -> dict[str, tuple[nn.Module, Any]]:
        attention = te.DotProductAttention(2, 16, attention_dropout=0.0)
        quantized = te.DotProductAttention(2, 16, attention_dropout=0.0)
        return {
            "Linear": (te.Linear(16, 32, device="cpu"), _recipe()),
            "LayerNormMLP": (te.LayerNormMLP(16, 32, device="cpu"), _recipe()),
            "GroupedLinear": (te.GroupedLinear(3, 16, 32, device="cpu"), _recipe()),
            "DotProductAttention": (attention, _recipe()),
            "quantized attention": (quantized, _recipe(fp8_dpa=True)),
        }

    def shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
        return {k: tuple(v.shape) for k, v in delayed_scaling.live_state(module).items()}

    early, late = {}, {}
    for name, (module, recipe) in made().items():
        with torch.no_grad(), te.autocast(enabled=True, recipe=recipe):
            delayed_scaling.allocate(module)
        early[name] = shapes(module)
    for name, (module, recipe) in made().items():
        inputs: list[Any] = [torch.randn(32, 16)]
        if name == "GroupedLinear":
            inputs.append([16, 0, 16])
        elif "ttention" in name:
            inputs = [torch.randn(8, 1, 2, 16) for _ in range(3)]
        # The rehearsal has no quantized attention, which allocates before it is looked for.
        known = (ValueError, NotImplementedError) if name == "quantized attention" else ()
        with (
            torch.no_grad(),
            te.autocast(enabled=True, recipe=recipe),
            contextlib.suppress(*known),
        ):
            module(*inputs)
        late[name] = shapes(module)
    return early, late
