"""What model code writes on parameters is found on the sharded and on the gathered ones."""

from __future__ import annotations

import gc
import types
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp_v2 import MixedPrecisionPolicy
from tests.distributed.on_ranks import on_ranks
from tests.distributed.wrapping import STRATEGIES, batch, wrap
from tests.reference.models import Stack, TiedInside


class Marker:
    """An object that code may hang on a parameter."""


MARKER = Marker()


def _scaled(value: int) -> int:
    return 3 * value


MARKS: dict[str, Any] = {
    "sequence_parallel": True,
    "partition_dim": 1,
    "partition_stride": 2,
    "tensor_model_parallel": True,
    "_tensor_parallel_mode": "column",
    "is_embedding_parameter": True,
    "is_embedding_or_output_parameter": True,
    "allreduce": False,
    "shared": True,
    "nobody_knows_this_one": ("a", 1),
    "an_object": MARKER,
    "a_function": _scaled,
}


@on_ranks(2, param_dtype=(None, torch.bfloat16), strategy=STRATEGIES)
def test_attributes_are_on_sharded_and_on_gathered_parameters(
    strategy: str, param_dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model: Any = Stack(2)
    model.output.requires_grad_(False)
    numbers = {}
    for index, (name, param) in enumerate(model.named_parameters()):
        numbers[name] = index
        param.number = index
        for attribute, value in MARKS.items():
            setattr(param, attribute, value)
    policy = MixedPrecisionPolicy(param_dtype=param_dtype)
    wrap(model, sharding_strategy=strategy, mp_policy=policy)
    looks = 0

    def look(module: nn.Module, prefix: str) -> None:
        nonlocal looks
        for name, param in module.named_parameters(prefix=prefix):
            looks += 1
            assert [n for n, v in MARKS.items() if getattr(param, n, "missing") is not v] == [], (
                name
            )
            assert param.number == numbers[name], name

    look(model, "")
    for index, block in enumerate(model.blocks):
        prefix = f"blocks.{index}"
        block.up.register_forward_hook(lambda *_, b=block, p=prefix: look(b, p))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        model(batch(dist.get_rank())).float().square().mean().backward()
        optimizer.step()
    look(model, "")
    per_block = len(list(model.blocks[0].parameters()))
    assert looks == 2 * len(numbers) + 4 * per_block


@on_ranks(2)
def test_a_tied_parameter_stays_one_and_keeps_its_attributes() -> None:
    model: Any = TiedInside()
    model.embedding.weight.shared_embedding = True
    wrap(model)
    tied = model.embedding.weight is model.head.weight
    seen = []
    model.head.register_forward_hook(
        lambda *_: seen.append(model.embedding.weight is model.head.weight)
    )
    model(batch(0))
    assert tied
    assert seen == [True]
    assert model.head.weight.shared_embedding


@on_ranks(2)
def test_a_method_hung_on_a_parameter_is_carried_and_keeps_no_original_alive() -> None:
    linear: Any = nn.Linear(4, 6, bias=False)
    linear.weight.base = 4
    linear.weight.compute = types.MethodType(lambda self, x: self.base + x, linear.weight)
    original = weakref.ref(linear.weight)
    wrap(linear)
    gc.collect()
    method = linear.weight.compute
    assert method(3) == 7
    assert method.__self__ is linear.weight
    assert original() is None
