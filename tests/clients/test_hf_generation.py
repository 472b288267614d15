"""transformers' models that evaluate and generate text during a training."""

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
    """Yield the tensors of an output of the library, with names."""
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
    """Return the outputs of a forward and of `generate()`, with scores and caches."""
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
                # The library cannot compute the router loss with a cache and a mask.
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
                # Finished ranks run further forwards, which fill their caches.
                caches = ("generated.past_key_values", "generated.cache")  # before 5.24, and since
                found = {key: found[key] for key in found if not key.startswith(caches)}
    model.train()
    # Scores of excluded tokens are infinite.
    return {key: value.clone().nan_to_num() for key, value in found.items()}


# The number of tokens of rank 0, its increment per rank, and `synced_gpus`.
_EQUAL, _INCREASING, _SYNCED = (4, 0, False), (2, 3, False), (2, 3, True)


def difference_with_evaluations(name: str, strategy: str, new_tokens: Any) -> float:
    evaluated = functools.partial(evaluate, name, new_tokens)
    training = training_of(name, options=options_of(strategy), evaluate=evaluated)
    return difference(dataclasses.replace(training, units=units_with_halves))


COMPARED = "losses, gradients, parameters, hidden states, generated tokens, scores and caches"


@pytest.mark.parametrize("strategy", ["ZeRO-1", "ZeRO-3"])
@pytest.mark.parametrize("name", MODELS)
def test_evaluation_and_generation_during_training_match_unsharded(
    measure: Measure, name: str, strategy: str
) -> None:
    measure("transformers", COMPARED, 2, difference_with_evaluations, name, strategy, _EQUAL)


@pytest.mark.parametrize("name", ["Llama", "Mixtral", "T5", "Mamba2"])
def test_ranks_may_generate_different_lengths_below_zero3(measure: Measure, name: str) -> None:
    arguments = (name, "ZeRO-1", _INCREASING)
    measure("transformers", COMPARED, 2, difference_with_evaluations, *arguments)


@pytest.mark.parametrize("name", ["Llama", "Mixtral", "T5", "Mamba2"])
def test_ranks_may_generate_different_lengths_with_synced_gpus(measure: Measure, name: str) -> None:
    arguments = (name, "ZeRO-3", _SYNCED)
    measure("transformers", COMPARED, 2, difference_with_evaluations, *arguments)


def generate_different_lengths_and_train() -> None:
    options = {**options_of("ZeRO-3"), "check_ranks": "always"}
    evaluated = functools.partial(evaluate, "Llama", _INCREASING)
    difference(training_of("Llama", options=options, evaluate=evaluated))


def test_check_ranks_detects_different_lengths_without_synced_gpus(clients: RankPools) -> None:
    with pytest.raises(RankFailure, match="is about to"):
        clients(2).run(generate_different_lengths_and_train)


def loss_through_cache(model: Any, batch: Batch) -> Any:
    """Return the loss of the second half of a text, given a differentiable cache of the first."""
    tokens = batch["input_ids"]
    half = tokens.shape[1] // 2
    first = model(input_ids=tokens[:, :half], use_cache=True)
    second = model(input_ids=tokens[:, half:], past_key_values=first.past_key_values)
    labels = tokens[:, half + 1 :].reshape(-1)
    return nn.functional.cross_entropy(second.logits[:, :-1].reshape(-1, VOCABULARY), labels)


def difference_through_cache(strategy: str) -> float:
    options = options_of(strategy)
    return difference(training_of("Llama", options=options, loss=loss_through_cache))


@pytest.mark.parametrize("strategy", ["ZeRO-1", "ZeRO-2"])
def test_gradients_through_a_cache_match_unsharded(measure: Measure, strategy: str) -> None:
    compared = "losses, gradients and parameters"
    measure("transformers", compared, 2, difference_through_cache, strategy)


def test_gradients_through_a_cache_raise_an_error_at_zero3(clients: RankPools) -> None:
    with pytest.raises(RankFailure, match="out of bounds for storage of size 0"):
        clients(2).run(difference_through_cache, "ZeRO-3")
