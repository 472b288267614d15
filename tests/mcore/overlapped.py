"""Trainings with `--overlap-moe-expert-parallel-comm`, in fp32 too, and with late gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch

from tests.mcore import session
from tests.mcore.session import Training
from tests.reference.late_product import LateProduct


def train_in_fp32(flags: Sequence[str], *args: Any, **options: Any) -> Training:
    """Train in fp32, where Megatron's check wants 16 bits and nothing of what is run does.

    Args:
        flags: Without `--bf16`.
        args: Of `session.train`.
        options: Likewise.
    """
    session.enter_rehearsal()
    from megatron.core.transformer.transformer_config import TransformerConfig

    check = TransformerConfig.__post_init__

    def check_as_bf16(config: Any) -> None:
        config.bf16 = True
        check(config)
        config.bf16 = False

    with mock.patch.object(TransformerConfig, "__post_init__", check_as_bf16):
        return session.train(flags, *args, **options)


def _delay(linear: Any, made: list[str], name: str) -> None:
    """Have a linear layer make its weight's gradient in `backward_dw`, as Transformer Engine's."""
    later: list[Any] = []

    def leave(_: Any, *gradient_and_input: torch.Tensor) -> None:
        later.append(gradient_and_input)

    def forward(x: torch.Tensor, *unused: Any, **others: Any) -> tuple[Any, None]:
        return LateProduct.apply(x, linear.weight, leave), None

    def backward_dw() -> None:
        grad, x = later.pop(0)
        assert not later, "an earlier backward was left without its gradient"
        linear.weight.grad = grad.t() @ x
        made.append(name)

    linear.forward, linear.backward_dw = forward, backward_dw


def train_with_late_gradients(flags: Sequence[str]) -> Training:
    """Train in fp32 as `--delay-wgrad-compute` would, with linear layers that do so on a CPU.

    Args:
        flags: Without `--delay-wgrad-compute`, for which Megatron checks that layers are
            Transformer Engine's.

    Returns:
        What was seen; `extras` has the names of layers that made a gradient late, in order.
    """
    gpt = session.enter_rehearsal()["gpt"]
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.moe.experts import TEGroupedMLP
    from megatron.core.transformer.transformer_config import TransformerConfig

    build, check = gpt.build_model, TransformerConfig.__post_init__
    made: list[str] = []

    def build_with_late_gradients(*args: Any, **kwargs: Any) -> Any:
        model = build(*args, **kwargs)
        for name, module in model.named_modules():
            if isinstance(module, SelfAttention):
                _delay(module.linear_qkv, made, f"{name}.linear_qkv")
                _delay(module.linear_proj, made, f"{name}.linear_proj")
            elif isinstance(module, TEGroupedMLP):
                module.backward_dw = lambda name=name: made.append(name)
        return model

    def check_and_delay(config: Any) -> None:
        check(config)
        config.delay_wgrad_compute = True

    with (
        mock.patch.object(gpt, "build_model", build_with_late_gradients),
        mock.patch.object(TransformerConfig, "__post_init__", check_and_delay),
    ):
        result = train_in_fp32(flags)
    result.extras = made
    return result
