"""A second, averaged model beside a sharded one: the recipe of the page, with torch and timm.

The classes deep-copy the model, so they are built before it is sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from megatron_fsdp_v2 import checkpoint, fully_shard
from tests.clients.conftest import Measure
from tests.clients.differences import STRATEGIES, full_copy, full_parameters
from tests.clients.test_accelerate import llama

DECAY = 0.7
STEPS = 4


def tokens(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(0, 61, (2, 7), generator=generator)


def shard(model: Any, strategy: str) -> None:
    for layer in model.model.layers:
        fully_shard(layer, sharding_strategy=STRATEGIES[strategy])  # type: ignore[arg-type]
    fully_shard(model, sharding_strategy=STRATEGIES[strategy])  # type: ignore[arg-type]


def _multi(model: nn.Module) -> Any:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))


def _single(model: nn.Module) -> Any:
    return AveragedModel(model, avg_fn=lambda mean, value, _: DECAY * mean + (1 - DECAY) * value)


def _timm_v2(model: nn.Module) -> Any:
    from timm.utils import ModelEmaV2

    return ModelEmaV2(model, decay=DECAY)


def _timm_v3(model: nn.Module) -> Any:
    from timm.utils import ModelEmaV3

    return ModelEmaV3(model, decay=DECAY)


CLASSES: dict[str, Callable[[nn.Module], Any]] = {
    "AveragedModel, multi_avg_fn": _multi,
    "AveragedModel, avg_fn": _single,
    "ModelEmaV2": _timm_v2,
    "ModelEmaV3": _timm_v3,
}


def update(average: Any, model: nn.Module) -> None:
    """Update an average, by the name of the method of its class."""
    method = "update_parameters" if isinstance(average, AveragedModel) else "update"
    getattr(average, method)(model)


def train(model: Any, after_step: Callable[[], object], ranks: Sequence[int]) -> None:
    """Train on the data of some ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    for step in range(STEPS):
        losses = [model(input_ids=t, labels=t).loss for t in (tokens(step, r) for r in ranks)]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        after_step()


def largest(ours: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == plain.keys()
    return max(float((ours[key] - value).abs().max()) for key, value in plain.items())


def difference_of_a_class(name: str, strategy: str, folder: Path) -> float:
    """Train both ways; compare averages, their outputs, and an average that was saved."""
    everyone = range(dist.get_world_size())
    plain, model = llama(), llama()
    expected, average = CLASSES[name](plain), CLASSES[name](model)
    shard(average.module, strategy)
    shard(model, strategy)
    train(plain, lambda: update(expected, plain), everyone)
    train(model, lambda: update(average, model), [dist.get_rank()])
    wanted, weights = full_parameters(expected.module), full_parameters(model)
    assert largest(weights, wanted) > 1e-3, "the average is not the last weights"
    errors = [largest(full_parameters(average.module), wanted)]
    with torch.no_grad():
        batch = tokens(STEPS, 0)
        logits = [
            m(input_ids=batch).logits for m in (average.module.eval(), expected.module.eval())
        ]
    errors.append(float((logits[0] - logits[1]).abs().max()))
    checkpoint.save(folder, average.module)
    again = llama()
    checkpoint.load(folder, again)
    assert largest(full_parameters(again), full_parameters(average.module)) == 0.0
    return max(errors)


@pytest.mark.parametrize(
    ("name", "strategy"),
    [*((name, "ZeRO-3") for name in CLASSES)]
    + [("AveragedModel, multi_avg_fn", strategy) for strategy in [*STRATEGIES][:-1]],
)
def test_average_beside_a_sharded_model_equals_that_of_a_plain_one(
    measure: Measure, tmp_path: Path, name: str, strategy: str
) -> None:
    compared = "averages of 4 steps, outputs of the averaged model"
    client = "timm" if "ModelEma" in name else "torch"
    measure(client, compared, 2, difference_of_a_class, name, strategy, tmp_path / "average")


class ListOfWeights:
    """What diffusers' `EMAModel` does: a list of averages, copied into the model and back."""

    def __init__(self, params: Any, *, foreach: bool) -> None:
        self.shadow = [param.clone().detach() for param in params]
        self.foreach = foreach

    @torch.no_grad()
    def step(self, params: Any) -> None:
        rest = 1 - DECAY
        if self.foreach:
            gaps = torch._foreach_sub(self.shadow, [*params])
            torch._foreach_sub_(self.shadow, gaps, alpha=rest)
            return
        for mean, param in zip(self.shadow, params, strict=True):
            mean.sub_(rest * (mean - param))

    def copy_to(self, params: Any, *, foreach: bool) -> None:
        if foreach:
            data = [param.data for param in params]
            torch._foreach_copy_(
                data, [mean.to(d.device).data for mean, d in zip(self.shadow, data, strict=True)]
            )
            return
        for mean, param in zip(self.shadow, params, strict=True):
            param.data.copy_(mean.to(param.device).data)

    def store(self, params: Any) -> None:
        self.stored = [param.detach().clone() for param in params]

    def restore(self, params: Any) -> None:
        for kept, param in zip(self.stored, params, strict=True):
            param.data.copy_(kept.data)


def difference_of_a_list(strategy: str, *, foreach: bool) -> float:
    """Train, evaluate with the averages, and restore and train on; compare with a plain model."""
    everyone = range(dist.get_world_size())
    plain, model = llama(), llama()
    shard(model, strategy)
    errors = []
    for own, ranks in ((plain, everyone), (model, [dist.get_rank()])):
        average = ListOfWeights(own.parameters(), foreach=foreach)
        train(own, lambda own=own, average=average: average.step(own.parameters()), ranks)  # type: ignore[misc]
        average.store(own.parameters())
        average.copy_to(own.parameters(), foreach=foreach)
        with torch.no_grad():
            logits = own(input_ids=tokens(STEPS, 0)).logits
        averages = full_parameters(own)
        average.restore(own.parameters())
        train(own, lambda: None, ranks)
        errors.append(
            {
                "logits": full_copy(logits),
                **averages,
                **{f"{k} after": v for k, v in full_parameters(own).items()},
            }
        )
    return largest(errors[1], errors[0])


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_list_of_averages_is_copied_into_a_sharded_model_and_back(
    measure: Measure, strategy: str, foreach: bool
) -> None:
    compared = "averages, outputs with them, parameters of 4 further steps"
    measure("torch", compared, 2, difference_of_a_list, strategy, foreach=foreach)
