"""transformers' models that are evaluated and generate text in the middle of a training."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp_v2 import FSDPModule
from tests.clients.conftest import Measure
from tests.clients.hf_models import MODELS, VOCABULARY, Batch, units_with_halves
from tests.clients.test_hf_training import difference, options_of, training_of
from tests.ranks import RankFailure, RankPools


def _tensors(prefix: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """What is in an output of the library, with names."""
    if isinstance(value, torch.Tensor):
        yield prefix, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _tensors(f"{prefix}.{name}", item)
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from _tensors(f"{prefix}.{index}", item)
    elif value is not None and hasattr(value, "layers"):
        for index, layer in enumerate(value.layers):
            yield from _tensors(f"{prefix}.{index}", {n: getattr(layer, n, None) for n in _CACHED})
    elif value is not None and hasattr(value, "self_attention_cache"):
        yield from _tensors(prefix, [value.self_attention_cache, value.cross_attention_cache])


_CACHED = ("keys", "values", "conv_states", "recurrent_states")


def evaluate(name: str, new_tokens: Any, model: Any, step: int, rank: int) -> dict[str, Any]:
    """Outputs of a forward, and of `generate()`: tokens, and scores from forwards with a cache."""
    del step
    model.eval()
    found: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        found.update(
            _tensors("forward", model(**MODELS[name].batch(7000 + rank), output_hidden_states=True))
        )
        if MODELS[name].generates:
            first, more, synced = new_tokens
            number = first + more * rank
            if name == "Mixtral":
                # The library cannot compute the loss of the router with a cache and a mask.
                model.config.output_router_logits = False
            output = model.generate(
                **MODELS[name].prompt(8000 + rank),
                do_sample=False,
                min_new_tokens=number,
                max_new_tokens=number,
                return_dict_in_generate=True,
                output_scores=True,
                synced_gpus=synced and dist.get_world_size() > 1 and isinstance(model, FSDPModule),
            )
            if name == "Mixtral":
                model.config.output_router_logits = True
            found.update(_tensors("generated", dict(output)))
            assert any("keys" in key or "states" in key for key in found), "no cache was found"
            if synced:
                # Ranks that are done go on with forwards, and those fill their caches.
                found = {key: found[key] for key in found if "past_key_values" not in key}
    model.train()
    # Scores of what must not be generated are infinite.
    return {key: value.clone().nan_to_num() for key, value in found.items()}


# Tokens that rank 0 generates, how many more every further rank, and whether ranks wait for all.
_AS_MANY, _MORE_ON_SOME_RANKS, _SYNCED = (4, 0, False), (2, 3, False), (2, 3, True)


def difference_with_evaluations(name: str, strategy: str, new_tokens: Any) -> float:
    evaluated = functools.partial(evaluate, name, new_tokens)
    training = training_of(name, options=options_of(strategy), evaluate=evaluated)
    return difference(dataclasses.replace(training, units=units_with_halves))


COMPARED = "losses, gradients, parameters, hidden states, generated tokens, scores and caches"


@pytest.mark.parametrize("strategy", ["ZeRO-1", "ZeRO-3"])
@pytest.mark.parametrize("name", MODELS)
def test_evaluating_and_generating_between_backwards_and_steps_is_as_unsharded(
    measure: Measure, name: str, strategy: str
) -> None:
    measure("transformers", COMPARED, 2, difference_with_evaluations, name, strategy, _AS_MANY)


@pytest.mark.parametrize("name", ["Llama", "Mixtral", "T5", "Mamba2"])
def test_ranks_may_generate_different_lengths_where_weights_are_whole(
    measure: Measure, name: str
) -> None:
    arguments = (name, "ZeRO-1", _MORE_ON_SOME_RANKS)
    measure("transformers", COMPARED, 2, difference_with_evaluations, *arguments)


@pytest.mark.parametrize("name", ["Llama", "Mixtral", "T5", "Mamba2"])
def test_ranks_may_generate_different_lengths_with_synced_gpus(measure: Measure, name: str) -> None:
    arguments = (name, "ZeRO-3", _SYNCED)
    measure("transformers", COMPARED, 2, difference_with_evaluations, *arguments)


def generate_different_lengths_and_train() -> None:
    options = {**options_of("ZeRO-3"), "check_ranks": "always"}
    evaluated = functools.partial(evaluate, "Llama", _MORE_ON_SOME_RANKS)
    difference(training_of("Llama", options=options, evaluate=evaluated))


def test_generating_different_lengths_without_synced_gpus_is_found_by_check_ranks(
    clients: RankPools,
) -> None:
    with pytest.raises(RankFailure, match="is about to"):
        clients(2).run(generate_different_lengths_and_train)


def second_half_after_the_first(model: Any, batch: Batch) -> Any:
    """The loss of the second half of a text, with the first in a cache that has gradients."""
    tokens = batch["input_ids"]
    half = tokens.shape[1] // 2
    first = model(input_ids=tokens[:, :half], use_cache=True)
    second = model(input_ids=tokens[:, half:], past_key_values=first.past_key_values)
    labels = tokens[:, half + 1 :].reshape(-1)
    return nn.functional.cross_entropy(second.logits[:, :-1].reshape(-1, VOCABULARY), labels)


def difference_through_a_cache(strategy: str) -> float:
    options = options_of(strategy)
    return difference(training_of("Llama", options=options, loss=second_half_after_the_first))


@pytest.mark.parametrize("strategy", ["ZeRO-1", "ZeRO-2"])
def test_gradients_flow_through_a_cache_as_unsharded(measure: Measure, strategy: str) -> None:
    compared = "losses, gradients and parameters"
    measure("transformers", compared, 2, difference_through_a_cache, strategy)


def test_gradients_through_a_cache_are_an_error_where_weights_are_dropped(
    clients: RankPools,
) -> None:
    with pytest.raises(RankFailure, match="out of bounds for storage of size 0"):
        clients(2).run(difference_through_a_cache, "ZeRO-3")
