"""transformers' own FSDP2 (`distributed_config`) with this package, by one import."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open

from megatron_fsdp_v2.dtensor.sharded_rows import ShardedRows
from tests.clients.conftest import Measure, Record, forget_accelerators
from tests.clients.hf_models import MODELS
from tests.clients.test_hf_training import trainer_losses
from tests.distributed.wrapping import whole
from tests.ranks import RankPools

STEPS = 2
SIZES = {
    "FSDP": {"fsdp_size": 2},
    "FSDP of 4": {"fsdp_size": 4},
    "HSDP": {"fsdp_size": 2, "dp_replicate_size": 2},
}
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


def loaded(
    cls: Any, folder: Path, sizes: str = "FSDP", model_config: Any = None, **options: Any
) -> Any:
    """Load a folder sharded, as a user does."""
    from transformers.distributed import DistributedConfig

    import megatron_fsdp_v2_for.transformers as adapter

    adapter.install(**options)
    try:
        config = DistributedConfig(**SIZES[sizes])
        return cls.from_pretrained(folder, config=model_config, distributed_config=config)
    finally:
        adapter.uninstall()


def saved_plain(name: str, folder: Path) -> Any:
    """Build an unsharded model and save it on rank 0."""
    torch.manual_seed(0)
    model = MODELS[name].build().eval()
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    return model


def difference_after_training(
    name: str, folder: Path, sizes: str, options: dict[str, Any]
) -> float:
    """Load, train and save, sharded and unsharded; return the largest difference.

    Every rank trains on the same batch, without dropout.
    """
    plain = saved_plain(name, folder / "plain")
    model = loaded(MODELS[name].cls, folder / "plain", sizes, **options)
    models = plain, model
    assert any(isinstance(param, ShardedRows) for param in model.parameters())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, eps=1e-3) for m in models]
    differences = []
    for step in range(STEPS + 1):
        expected = plain.state_dict()
        state = {key: whole(value.detach()) for key, value in model.state_dict().items()}
        assert state.keys() == expected.keys()
        differences += [float((state[k] - value).abs().max()) for k, value in expected.items()]
        losses = [m(**MODELS[name].batch(step)).loss for m in models]
        differences.append(float((losses[1] - losses[0]).detach().abs()))
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    model.save_pretrained(folder / "trained")
    dist.barrier()
    again = MODELS[name].cls.from_pretrained(folder / "trained").state_dict()
    final = {key: whole(value.detach()) for key, value in model.state_dict().items()}
    assert all(torch.equal(again[key], value) for key, value in final.items())
    return max(differences)


@pytest.mark.parametrize(
    ("name", "sizes", "strategy"),
    [*((name, "FSDP", STRATEGIES[-1]) for name in MODELS)]
    + [("Mixtral", "FSDP", strategy) for strategy in STRATEGIES[:-1]]
    + [("Llama tied", "HSDP", STRATEGIES[-1]), ("Mixtral", "FSDP of 4", STRATEGIES[-1])],
)
def test_from_pretrained_shards_and_trains_like_unsharded(
    measure: Measure, tmp_path: Path, name: str, sizes: str, strategy: str
) -> None:
    ranks, compared = math.prod(SIZES[sizes].values()), "losses, parameters of 3 steps"
    function, options = difference_after_training, {"sharding_strategy": strategy}
    measure("transformers", compared, ranks, function, name, tmp_path, sizes, options)


@contextmanager
def counted_reads() -> Iterator[Counter[str]]:
    """Count the bytes that transformers reads of each tensor of safetensors files."""
    nbytes: Counter[str] = Counter()

    class Slice:
        def __init__(self, source: Any, key: str) -> None:
            self._source, self._key = source, key

        def __getattr__(self, name: str) -> Any:
            return getattr(self._source, name)

        def __getitem__(self, index: Any) -> torch.Tensor:
            tensor: torch.Tensor = self._source[index]
            nbytes[self._key] += tensor.nbytes
            return tensor

    class File:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._file = safe_open(*args, **kwargs)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        def get_slice(self, key: str) -> Slice:
            return Slice(self._file.get_slice(key), key)

    with mock.patch("transformers.modeling_utils.safe_open", File):
        yield nbytes


@contextmanager
def converted_names() -> Iterator[None]:
    """Make folders of Mixtral hold other tensors, which the library converts in several ways."""
    from transformers import conversion_mapping
    from transformers.core_model_loading import (
        Chunk,
        Concatenate,
        ConversionOps,
        Interleave,
        Split,
        Transpose,
        WeightConverter,
    )

    class Scaled(ConversionOps):
        """Multiply a tensor by a scalar, which is 2; its own reverse in this test."""

        reverse_op = property(lambda self: self)

        def convert(self, input_dict: Any, target_patterns: Any, **kwargs: Any) -> dict[str, Any]:
            tensor, *scale = (value[0] for value in input_dict.values())
            if scale:
                return {target_patterns[0]: tensor * scale[0]}
            return dict(zip(target_patterns, (tensor / 2, torch.tensor(2.0)), strict=True))

    attention = [f"self_attn.{name}_proj.weight" for name in "qkv"]
    norms = [f"{name}_layernorm.weight" for name in ("input", "post_attention")]
    down = "mlp.experts.down_proj"
    conversions = [
        WeightConverter("self_attn.qkv.weight", attention, [Split(dim=0)]),
        WeightConverter("norms.weight", norms, [Chunk(dim=0)]),
        WeightConverter(["o_a.weight", "o_b.weight"], "o_proj.weight", [Concatenate(dim=0)]),
        WeightConverter(["experts.a", "experts.b"], "experts.gate_up_proj", [Concatenate(dim=1)]),
        WeightConverter("layers.0.experts.down", f"layers.0.{down}", [Transpose(1, 2)]),
        WeightConverter(f"layers.1.{down}", f"layers.1.{down}", [Transpose(1, 2, check_dims=True)]),
        WeightConverter("model.permuted.weight", READ_WHOLE[0], [Interleave(dim=0)]),
        WeightConverter(["lm_head.scaled", "lm_head.scale"], READ_WHOLE[1], [Scaled()]),
    ]
    conversion_mapping.get_checkpoint_conversion_mapping("mixtral")
    known: Any = conversion_mapping._checkpoint_conversion_mapping_cache
    with mock.patch.dict(known, {"mixtral": conversions}):
        yield


READ_WHOLE = ("model.norm.weight", "lm_head.weight")
"""Parameters of `converted_names` that are not made of rows of a tensor in the folder."""


def bytes_read(name: str, folder: Path, is_converted: bool) -> tuple[int, int, float]:
    """Load a folder.

    Returns:
        The bytes that this rank read, those that it needs, and the largest difference of weights.
    """
    with converted_names() if is_converted else nullcontext():
        plain = saved_plain(name, folder)
        with counted_reads() as nbytes:
            model = loaded(MODELS[name].cls, folder)
    params = dict(model.named_parameters())
    needed = sum(param.to_local().nbytes for param in params.values())
    if is_converted:
        needed += sum(params[key].nbytes - params[key].to_local().nbytes for key in READ_WHOLE)
        needed += torch.tensor(2.0).nbytes
    errors = (
        (whole(p.detach()) - plain.get_parameter(key)).abs().max() for key, p in params.items()
    )
    return nbytes.total(), needed, float(max(errors))


@pytest.mark.parametrize(
    ("name", "is_converted"),
    [
        ("Llama", False),
        ("Llama tied", False),
        ("Mixtral", False),
        ("Mixtral", True),
        ("Qwen3 MoE", False),
    ],
)
def test_every_rank_reads_its_rows_only(
    clients: RankPools, record: Record, tmp_path: Path, name: str, is_converted: bool
) -> None:
    found = clients(2).run(bytes_read, name, tmp_path, is_converted)
    assert all(read == needed for read, needed, _ in found)
    compared = "bytes read by a rank, those of its rows; parameters"
    record("transformers", compared, max(error for *_, error in found), 0.0)


def difference_of_fused_names(folder: Path) -> float:
    """Load a folder whose gate and up projections are one tensor, which the library splits."""
    import transformers

    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3}
    config = transformers.Dinov2Config(**sizes, image_size=8, patch_size=4, use_swiglu_ffn=True)
    torch.manual_seed(0)
    plain = transformers.Dinov2Model(config)
    if dist.get_rank() == 0:
        plain.save_pretrained(folder)
    dist.barrier()
    with counted_reads() as nbytes:
        model = loaded(transformers.Dinov2Model, folder)
    assert any("mlp.weights_in" in name for name in nbytes)
    assert nbytes.total() == sum(param.to_local().nbytes for param in model.parameters())
    state = model.state_dict()
    return max(
        float((whole(state[k]) - value).abs().max()) for k, value in plain.state_dict().items()
    )


def test_fused_names_of_a_folder_are_split_before_they_are_sharded(
    measure: Measure, tmp_path: Path
) -> None:
    measure("transformers", "parameters", 2, difference_of_fused_names, tmp_path, at_most=0.0)


def difference_of_distributed_checkpoint(name: str, folder: Path) -> float:
    """Save one file for each rank, and load the files."""
    import megatron_fsdp_v2_for.transformers as adapter

    plain = saved_plain(name, folder / "plain")
    model = loaded(MODELS[name].cls, folder / "plain")
    adapter.install()
    try:
        model.save_pretrained(folder / "sharded", distributed_checkpoint=True)
    finally:
        adapter.uninstall()
    state = loaded(MODELS[name].cls, folder / "sharded").state_dict()
    errors = ((whole(state[key]) - value).abs().max() for key, value in plain.state_dict().items())
    return float(max(errors))


@pytest.mark.parametrize("name", ["Llama", "GPT2"])  # GPT2 ties its embeddings.
def test_distributed_checkpoint_is_saved_and_loaded(
    measure: Measure, tmp_path: Path, name: str
) -> None:
    function = difference_of_distributed_checkpoint
    measure("transformers", "parameters", 2, function, name, tmp_path, at_most=0.0)


def llama_losses(model: Any, folder: Path) -> list[float]:
    return trainer_losses("Llama", model, folder)


def difference_with_trainer(
    folder: Path, losses_of: Callable[[Any, Path], list[float]] = llama_losses
) -> float:
    """Return the difference of a model that transformers shards, and of a plain one, trained."""
    plain = saved_plain("Llama", folder / "plain")
    model = loaded(MODELS["Llama"].cls, folder / "plain")
    before = {key: value.clone() for key, value in plain.state_dict().items()}
    expected, losses = (losses_of(m, folder) for m in (plain, model))
    assert len(expected) == 3
    final = {key: whole(value.detach()) for key, value in model.state_dict().items()}
    assert any((before[k] - value).abs().max() > 1e-3 for k, value in final.items())
    errors = [abs(a - b) for a, b in zip(losses, expected, strict=True)]
    errors += [float((final[k] - value).abs().max()) for k, value in plain.state_dict().items()]
    return max(errors)


def test_trainer_trains_a_model_of_distributed_config_like_a_plain_one(
    measure: Measure, tmp_path: Path
) -> None:
    compared = "losses and parameters after 3 steps, clipped, accumulated"
    measure("transformers", compared, 2, difference_with_trainer, tmp_path)


def load_into_a_larger_vocabulary(folder: Path) -> str:
    plain = saved_plain("Llama", folder)
    config = copy.deepcopy(plain.config)
    config.vocab_size += 2
    with pytest.raises(ValueError, match="the folder has a tensor of shape") as caught:
        loaded(MODELS["Llama"].cls, folder, model_config=config)
    return str(caught.value)


def test_folder_of_another_shape_is_an_error_on_every_rank(
    clients: RankPools, tmp_path: Path
) -> None:
    for message in clients(2).run(load_into_a_larger_vocabulary, tmp_path):
        assert "shape (61, 12) for a parameter of shape (63, 12)" in message


def trainer_asked_for_fsdp(folder: Path) -> tuple[bool, str]:
    """Train one step with the FSDP of Trainer on a CPU; return what it says and what it does."""
    import transformers

    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=1,
        fsdp="full_shard",
        fsdp_config={"fsdp_version": 2},
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    forget_accelerators()
    rows = [{key: value[0] for key, value in MODELS["Llama"].batch(0).items()}] * 16
    model = MODELS["Llama"].build()
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
    is_enabled = trainer.is_fsdp_enabled
    trainer.train()
    return is_enabled, type(trainer.model_wrapped).__name__


def test_trainer_asked_for_fsdp_on_a_cpu_trains_with_ddp_as_the_page_says(
    clients: RankPools, tmp_path: Path
) -> None:
    found = clients(2).run(trainer_asked_for_fsdp, tmp_path)
    assert found == [(False, "DistributedDataParallel")] * 2


def replaced() -> list[Any]:
    """Return the present values of what the adapter replaces."""
    import megatron_fsdp_v2_for.transformers as adapter

    targets = [patch.find() for patch in adapter.PATCHES["5.24"]]
    return [getattr(*target) for target in targets if target]


def test_uninstall_restores_transformers() -> None:
    import megatron_fsdp_v2_for.transformers as adapter

    before = replaced()
    adapter.install(sharding_strategy="optim")
    assert not any(a is b for a, b in zip(before, replaced(), strict=True))
    adapter.uninstall()
    assert all(a is b for a, b in zip(before, replaced(), strict=True))
