"""torchtitan's own trainer, sharded by this package, trains as with FSDP2."""

from __future__ import annotations

import gc
import importlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import fsdp

import megatron_fsdp_v2_for.torchtitan
from megatron_fsdp_v2.memory.observer import CollectiveIssued
from megatron_fsdp_v2.runtime.module import unit_of
from megatron_fsdp_v2_for.torchtitan import PATCHES
from tests.clients.conftest import Measure
from tests.clients.differences import difference_of, full_parameters, results_of
from tests.clients.newest.small_models import TEXT, pictures, shrink_flux, write_files
from tests.clients.table import pinned
from tests.ranks import RankPools

COMPARED = "losses, norms, parameters of 3 steps with FSDP2's"
STRATEGY = "optim_grads_params"
TRANSFORMERS = "transformers_modeling_backend"
TRANSFORMERS_MODEL = f"torchtitan.experiments.{TRANSFORMERS}.model"
LENGTH = 32
STEPS = 3
TIMEOUT_S = 240.0


def classes() -> Any:
    """Return a dataloader and a tokenizer, since torchtitan's read files that it does not ship."""
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer

    class Tokens(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            infinite: bool = True
            gives_positions: bool = True

        def __init__(self, config: Any, *, dp_rank: int, local_batch_size: int, **_: Any) -> None:
            self.rank, self.batch, self.step = dp_rank, local_batch_size, 0
            positions = torch.arange(LENGTH).expand(self.batch, -1)
            self.more = {"positions": positions} if config.gives_positions else {}

        def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
            while True:
                numbers = torch.Generator().manual_seed(1000 * self.step + self.rank)
                self.step += 1
                tokens = torch.randint(0, 2048, (self.batch, LENGTH + 1), generator=numbers)
                yield {"input": tokens[:, :-1], **self.more}, tokens[:, 1:]

        def state_dict(self) -> dict[str, Any]:
            return {"step": self.step}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.step = state["step"]

    class NoTokenizer(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            max_t5_encoding_len: int = TEXT

        def __init__(self, config: Any, *, tokenizer_path: str) -> None:
            super().__init__()

        encode = decode = get_vocab_size = None

    NoTokenizer.__abstractmethods__ = frozenset()
    return SimpleNamespace(tokens=Tokens, tokenizer=NoTokenizer)


def job_config(model: str, folder: str, sections: dict[str, dict[str, Any]]) -> Any:
    """Return torchtitan's configuration of a model for a CPU, with changed settings by section.

    Args:
        model: Name of the model, perhaps with a number of layers, such as `llama3:4`.
        folder: Folder of checkpoints and of other files.
        sections: Changed settings.
    """
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention

    model, _, num_layers = model.partition(":")
    package = "experiments" if model == TRANSFORMERS else "models"
    registry = importlib.import_module(f"torchtitan.{package}.{model}.config_registry")
    config = getattr(registry, f"{model}_debugmodel")()
    ours = classes()
    config.dataloader, config.tokenizer = ours.tokens.Config(), ours.tokenizer.Config()
    config.validator.dataloader = config.dataloader
    config.dump_folder = folder
    if model == "flux":
        config.dataloader = pictures().Config()
        shrink_flux(config, folder)
    elif model == TRANSFORMERS:
        config.hf_model = f"{folder}/qwen3"
        # Positions are for the mask of FlexAttention.
        config.dataloader.gives_positions = False
    else:
        # One dense layer of deepseek_v3 and one of experts.
        del config.model_spec.model.layers[int(num_layers or 2) :]
    # FlexAttention is a compiled kernel.
    for _, _, parent, name in list(config.model_spec.traverse(FlexAttention.Config)):
        setattr(parent, name, ScaledDotProductAttention.Config())
    settings: dict[str, dict[str, Any]] = {
        "training": {
            "seq_len": LENGTH,
            "local_batch_size": 2,
            "steps": STEPS,
            "disable_cuda_graphs": True,
            "mixed_precision_param": "float32",
            # Norms differ in the last bit, and experts compute with rounded weights.
            "max_norm": 1e9,
        },
        "checkpoint": {"enable": True, "load_only": True, "load_step": 0},
        # The default, fused, has no kernel for some CPUs.
        "optimizer": {"implementation": "foreach"},
        "debug": {"seed": 1, "enable_structured_logging": False},
        "metrics": {"log_freq": 1},
    }
    for section, changes in [*settings.items(), *sections.items()]:
        part = config if section == "config" else getattr(config, section)
        for key, value in changes.items():
            assert hasattr(part, key), f"{section}.{key}"
            setattr(part, key, value() if callable(value) else value)
    return config


def trainer(config: Any, strategy: str = "") -> Any:
    """Build torchtitan's trainer, which shards with FSDP2 if no strategy is given."""
    from torchtitan.components.metrics import DeviceMemStats

    monitor = mock.Mock(device_name="cpu", get_peak_stats=lambda: DeviceMemStats(0, 0, 0, 0, 0, 0))
    build = "torchtitan.components.metrics.build_device_memory_monitor"
    muon = "torchtitan.distributed.flex_shard.dist_muon.DistMuon._validate_parameter_storage"
    if strategy:
        megatron_fsdp_v2_for.torchtitan.install(sharding_strategy=strategy)
    try:
        # DistMuon asks for CUDA and its streams; the reader of flux's files knows no cpu:0.
        with (
            mock.patch("torchtitan.tools.utils.get_local_device", lambda: torch.device("cpu")),
            mock.patch(build, return_value=monitor),
            mock.patch(muon, return_value=torch.device("cpu")),
            mock.patch("torch.cpu.Stream"),
        ):
            job = config.build()
    finally:
        megatron_fsdp_v2_for.torchtitan.uninstall()
        gc.enable()
    for part in job.model_parts:
        # torchtitan leaves these buffers of transformers 5.23 uninitialized.
        if (rotary := getattr(part, "rotary_emb", None)) is not None:
            values, _ = rotary.compute_default_rope_parameters(rotary.config)
            rotary.inv_freq.copy_(values)
            rotary.original_inv_freq.copy_(values)
    for module in itertools.chain(*(part.modules() for part in job.model_parts)):
        if isinstance(module, fsdp.FSDPModule) and not strategy:
            # Otherwise FSDP2 lets NCCL scale gradients, which gloo cannot.
            module.set_force_sum_reduction_for_comms(True)
    return job


def parameters(job: Any) -> dict[str, torch.Tensor]:
    """Return copies of whole parameters, by their names in checkpoints. Collective."""
    from torchtitan.components.checkpointer.utils import canonical_fqn

    found = itertools.chain(*(full_parameters(part).items() for part in job.model_parts))
    return {canonical_fqn(name): param for name, param in found}


def all_to_all(
    output: list[torch.Tensor], given: list[torch.Tensor], group: Any = None, **_: Any
) -> None:
    sizes = [len(part) for part in output]
    made = torch.empty(sum(sizes), *given[0].shape[1:], dtype=given[0].dtype)
    dist.all_to_all_single(made, torch.cat(given), sizes, list(map(len, given)), group=group)
    for part, values in zip(output, made.split(sizes), strict=True):
        part.copy_(values)


def train(job: Any) -> Any:
    """Run the trainer to its end; return the results to compare."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    losses, norms = [], []

    def log(step: int, average: float, largest: float, norm: float, **_: Any) -> None:
        losses.append(torch.tensor(average))
        norms.append(torch.tensor(norm))

    def log_validation(loss: float, step: int) -> None:
        losses.append(torch.tensor(loss))

    # NCCL's timeouts, and a pause for its watchdog; unequal sizes, which gloo rejects in a list;
    # a compiled kernel.
    with (
        mock.patch("torch.distributed.all_to_all", all_to_all),
        mock.patch("torchtitan.distributed.utils.set_pg_timeouts"),
        mock.patch("time.sleep"),
        mock.patch.object(job.metrics_processor, "log", log),
        mock.patch.object(job.metrics_processor, "log_validation", log_validation),
        mock.patch(f"{TRANSFORMERS_MODEL}.flex_attention_forward", sdpa_attention_forward),
    ):
        job.train()
    job.close()
    return results_of(losses, norms, parameters(job))


def seed_job(model: str, folder: str) -> Any:
    """Build the trainer of torchtitan's seed checkpoints, whose model is not sharded."""
    seeds = {"checkpoint": {"create_seed_checkpoint": True, "load_only": False}}
    return trainer(job_config(model, folder, seeds))


def save_seed(model: str, folder: str) -> None:
    write_files(model, folder)
    seed = seed_job(model, folder)
    seed.checkpointer.save(curr_step=0, last_step=True)
    seed.close()


def difference(model: str, folder: str, sections: dict[str, Any]) -> float:
    """Return the difference to FSDP2, both from one seed checkpoint."""
    save_seed(model, folder)
    theirs = train(trainer(job_config(model, folder, sections)))
    return difference_of(train(trainer(job_config(model, folder, sections), STRATEGY)), theirs)


def reductions_of_output(folder: str) -> int:
    """Train a sharded llama3, and return the number of reductions of its output layer."""
    save_seed("llama3", folder)
    job = trainer(job_config("llama3", folder, {}), STRATEGY)
    unit = unit_of(job.model_parts[0].lm_head)
    names, issued = {group.name for group in unit.groups}, []

    def note(event: Any) -> None:
        if isinstance(event, CollectiveIssued) and event.group in names:
            issued.append(event.kind)

    unit.context.observer.subscribe(note)
    train(job)
    return issued.count("reduce_scatter")


def difference_of_resumed(folder: str, first: str, second: str) -> float:
    """Return the difference of step 3, resumed from the other's checkpoint of step 2."""
    save_seed("llama3", folder)
    saving = {"load_only": False, "load_step": -1, "interval": 2}
    saving["initial_load_path"] = f"{folder}/checkpoint/step-0"
    own = f"{folder}/own"
    whole = train(trainer(job_config("llama3", own, {"checkpoint": saving}), first))
    resumed = train(trainer(job_config("llama3", own, {"checkpoint": {"load_step": 2}}), second))
    last = {name: whole[name][2:] for name in ("losses", "norms")}
    return difference_of(resumed, whole | last)


def difference_of_initial_weights(model: str, folder: str, sections: dict[str, Any]) -> float:
    """Return the difference between the initial weights of a sharded and an unsharded model."""
    whole = parameters(seed_job(model, folder))
    found = parameters(trainer(job_config(model, folder, sections), STRATEGY))
    return difference_of({"parameters": found}, {"parameters": whole})


def full_recomputation() -> Any:
    from torchtitan.distributed.activation_checkpoint import FullAC

    return FullAC.Config()


def memory_budget() -> Any:
    from torchtitan.distributed.activation_checkpoint import MemoryBudgetAC

    return MemoryBudgetAC.Config()


def unchunked_loss() -> Any:
    from torchtitan.models.llama3.config_registry import llama3_debugmodel_ce_loss

    return llama3_debugmodel_ce_loss().loss


def dist_muon() -> Any:
    """Return optimizers of deepseek_v3: DistMuon by heads, matrices and experts, and AdamW."""
    from torch.distributed.tensor import Shard
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
    from torchtitan.distributed.flex_shard import BlockShard, BucketConfig, ComputeLayout, Owned

    layouts = {
        "layers.0.feed_forward.w1.weight": Owned(),
        "layers.1.moe.routed_experts.inner_experts.w1_EFD": Shard(0),
        "layers.1.moe.routed_experts.inner_experts.w2_EDF": Shard(0),
    }
    for layer in ("layers.0", "layers.1"):
        layouts[f"{layer}.attention.wq.weight"] = BlockShard(dim=0, block_size=192)
        layouts[f"{layer}.attention.wo.weight"] = Owned()
    return OptimizersContainer.Config(
        implementation="foreach",
        param_groups=[
            ParamGroupConfig(
                # Names may have the segment of a checkpointed layer.
                pattern=r"attention\.w[qo]\.|feed_forward\.w1\.|experts\.w1_EFD|experts\.w2_EDF",
                optimizer_name="DistMuon",
                optimizer_kwargs={"lr": 0.01, "foreach": False},
            ),
            ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 8e-4}),
        ],
        optimizer_factory_kwargs_by_name={
            "DistMuon": {
                "bucket_configs": [BucketConfig(patterns=("*",))],
                "compute_sharding_by_fqn": {
                    name: ComputeLayout({"dp_shard": shard}) for name, shard in layouts.items()
                },
            }
        },
    )


def parallel(backend: str = "spmd_types", **degrees: int) -> dict[str, dict[str, Any]]:
    sizes = {f"{name}_parallel_degree": size for name, size in degrees.items()}
    return {"parallelism": {"spmd_backend": backend, **sizes}}


HSDP = {"data_parallel_replicate_degree": 2}
PIPELINE = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "1F1B"}
# FSDP2 drops a gradient with the loss in chunks.
UNCHUNKED = {"loss": unchunked_loss, "activation_checkpoint": None}
COMPILED = {"enable": True, "backend": "aot_eager"}
TRAININGS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "llama3": ("llama3", 2, {}),
    "llama3 clipped": ("llama3", 2, {"training": {"max_norm": 0.5}}),
    "llama3 bfloat16": ("llama3", 2, {"training": {"mixed_precision_param": "bfloat16"}}),
    "llama3 HSDP": ("llama3", 4, {"parallelism": HSDP}),
    "llama3 HSDP, recomputed, micro-batches": (
        "llama3",
        4,
        {
            "parallelism": HSDP,
            "config": {"activation_checkpoint": full_recomputation},
            "training": {"global_batch_size": 16},
        },
    ),
    "llama3 pipeline": ("llama3", 4, {"parallelism": PIPELINE}),
    "llama3 zero bubble": (
        "llama3:4",
        4,
        {
            "parallelism": {**PIPELINE, "pipeline_parallel_schedule": "ZBVZeroBubble"},
            "config": UNCHUNKED,
            "training": {"local_batch_size": 4},
        },
    ),
    "llama3 compiled in a budget of memory": (
        "llama3",
        2,
        {"compile": COMPILED, "config": {"activation_checkpoint": memory_budget}},
    ),
    "llama3 validated": ("llama3", 2, {"validator": {"enable": True, "freq": 1, "steps": 2}}),
    "llama3 TP": ("llama3", 4, parallel(tensor=2)),
    "llama3 TP full_dtensor": ("llama3", 4, parallel("full_dtensor", tensor=2)),
    "llama3 TP partial_dtensor": ("llama3", 4, parallel("partial_dtensor", tensor=2)),
    "deepseek_v3": ("deepseek_v3", 2, {}),
    "deepseek_v3 EP": ("deepseek_v3", 4, parallel(expert=2)),
    "deepseek_v3 DistMuon": ("deepseek_v3", 2, {"config": {"optimizer": dist_muon}}),
    "qwen3": ("qwen3", 2, {}),
    # On one axis, FSDP2 would find the mesh of the seed's encoders, which flux shards too.
    "flux HSDP": ("flux", 4, {"parallelism": HSDP}),
    "flux CP": ("flux", 4, parallel(context=2)),
    "transformers TP": (TRANSFORMERS, 4, parallel(tensor=2)),
}
BOUNDS = {
    # The experts compute in bfloat16, so rounding amplifies the last bits.
    "deepseek_v3": 1e-5,
    "deepseek_v3 EP": 1e-5,
    # FSDP2 of torch 2.15 sums gradients of norms that are not rounded to bfloat16.
    "llama3 bfloat16": 1e-5,
    # Torch's norm of the gradient, summed in fp32 on a CPU, is itself off by that.
    "qwen3": 1e-5,
    "transformers TP": 5e-5,
    # Products of matrices in bfloat16, one by one and stacked.
    "deepseek_v3 DistMuon": 1e-4,
}
"""Largest differences above 1e-6."""


@pytest.mark.parametrize("training", TRAININGS)
def test_trainer_trains_like_fsdp2(measure: Measure, tmp_path: Path, training: str) -> None:
    model, ranks, sections = TRAININGS[training]
    at_most = BOUNDS.get(training, 1e-6)
    job = (difference, model, str(tmp_path), sections)
    measure("torchtitan", COMPARED, ranks, *job, at_most=at_most, timeout_s=TIMEOUT_S)


def test_output_layer_is_reduced_after_the_last_chunk_of_the_loss(
    clients: RankPools, tmp_path: Path
) -> None:
    # Once with the gradient of the layer, and once with that of the norm before it.
    counts = clients(2).run(reductions_of_output, str(tmp_path), timeout_s=TIMEOUT_S)
    assert counts == [2 * STEPS] * 2


@pytest.mark.parametrize("first", ["FSDP2", "this package"])
def test_trainer_resumes_from_a_checkpoint_of_the_other(
    measure: Measure, tmp_path: Path, first: str
) -> None:
    strategies = ("", STRATEGY) if first == "FSDP2" else (STRATEGY, "")
    job = (difference_of_resumed, str(tmp_path), *strategies)
    measure("torchtitan", "loss, norm, parameters of the next step", 2, *job, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("training", ["llama3", "llama3 TP", "deepseek_v3 EP"])
def test_initial_weights_are_those_of_the_unsharded_model(
    measure: Measure, tmp_path: Path, training: str
) -> None:
    model, ranks, sections = TRAININGS[training]
    job = (difference_of_initial_weights, model, str(tmp_path), sections)
    measure("torchtitan", "initial weights", ranks, *job, at_most=0, timeout_s=TIMEOUT_S)


def calls_of_fsdp2() -> list[Any]:
    modules = [patch.target.partition(":") for patch in PATCHES["0.3"]]
    names = [(module, name) for module, _, name in modules if name == "fully_shard"]
    return [getattr(importlib.import_module(module), name) for module, name in names]


def replaces_every_call() -> None:
    before = calls_of_fsdp2()
    megatron_fsdp_v2_for.torchtitan.install()
    changed = calls_of_fsdp2()
    megatron_fsdp_v2_for.torchtitan.uninstall()
    assert before == calls_of_fsdp2() == [fsdp.fully_shard] * 3
    assert not any(call is fsdp.fully_shard for call in changed)


def test_install_also_replaces_the_calls_of_flux_and_of_the_transformers_backend(
    clients: RankPools,
) -> None:
    clients(1).run(replaces_every_call)


def test_installed_versions_match_the_pinned_ones() -> None:
    expected = pinned(Path(__file__).parent)
    assert {name: version(name) for name in expected} == expected
