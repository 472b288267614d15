"""A small recipe of nemo-automodel, which trains on the ranks of a pool without GPUs."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental._context_parallel import _attention

import megatron_fsdp_v2_for.automodel
from megatron_cpu_rehearsal.cuda_stubs import install_stubs
from megatron_cpu_rehearsal.devices import CpuDevices
from megatron_fsdp_v2 import FSDPModule
from megatron_fsdp_v2_patching import Patches
from tests.clients.differences import Results, full_parameters, results_of
from tests.clients.hf_models import MODELS
from tests.clients.stubs import stub

_PATCHES = Patches()
_DEVICES = contextlib.ExitStack()


def start() -> None:
    """Import the recipe in this process and those forked from it, whose GPU is the CPU."""
    stub(["torchao"])
    install_stubs(_PATCHES)
    # Meshes are those of CPUs.
    _PATCHES.set(torch.cuda, "is_available", lambda: False)
    _DEVICES.enter_context(CpuDevices())
    for operator in (_ATTENTION, _ATTENTION_BACKWARD):
        _attention.custom_ops[operator] = _ring_attention
    importlib.import_module("nemo_automodel.recipes.llm.train_ft")


_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def _ring_attention(operator: Any, args: Any, kwargs: Any) -> Any:
    """Compute attention over a context-parallel axis. Torch has such a rule for GPUs only."""
    mesh = args[0].device_mesh
    tensors = [arg.to_local() for arg in args if isinstance(arg, DTensor)]
    options = {"dropout_p": args[-2], "is_causal": args[-1], "scale": kwargs.get("scale")}
    if operator is _ATTENTION:
        ring = _attention._templated_ring_attention
        found = ring(mesh.get_group(), 2, operator, *tensors, **options)
    else:
        gradient, *others = tensors
        ring = _attention._templated_ring_attention_backward
        found = ring(mesh.get_group(), 2, operator, gradient, "grad_out", *others, **options)
    return tuple(DTensor.from_local(each, mesh, [Shard(2)], run_check=False) for each in found)


def build(name: str) -> Any:
    """Build one of `MODELS`, with a vocabulary that tensor parallelism can split."""
    model = MODELS[name]
    return dataclasses.replace(model, options={**model.options, "vocab_size": 62}).build()


def save_model(folder: str, name: str) -> None:
    """Save one of `MODELS` with random weights, for all trainings."""
    torch.manual_seed(1)
    build(name).save_pretrained(folder)


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        folder: Folder of the model.
        output: Folder of checkpoints. A training resumes from the last one.
        zero_dp_strategy: Of the strategy `megatron_fsdp`; None for `fsdp2`.
        steps: Number of steps after which the training ends.
        tp_size: Number of tensor-parallel ranks.
        cp_size: Number of context-parallel ranks.
        is_exported: Whether checkpoints have a folder of transformers as well.
    """

    folder: str
    output: str
    zero_dp_strategy: int | None = None
    steps: int = 4
    tp_size: int = 1
    cp_size: int = 1
    is_exported: bool = False

    @property
    def recipe(self) -> dict[str, Any]:
        """The recipe, as its YAML file has it."""
        distributed: dict[str, Any] = {"strategy": "fsdp2", "mp_policy": _FP32}
        if self.zero_dp_strategy is not None:
            distributed = {"strategy": "megatron_fsdp", "zero_dp_strategy": self.zero_dp_strategy}
        distributed |= {"tp_size": self.tp_size, "cp_size": self.cp_size}
        return {
            "seed": 1,
            "step_scheduler": {
                "global_batch_size": 8,
                "local_batch_size": 2,
                "ckpt_every_steps": 2,
                "max_steps": self.steps,
                "num_epochs": 1,
            },
            "dist_env": {"backend": "gloo"},
            "model": {
                "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained",
                "pretrained_model_name_or_path": self.folder,
                "torch_dtype": "float32",
                "attn_implementation": "sdpa",
                "use_liger_kernel": False,
                "force_hf": True,
            },
            "checkpoint": {
                "enabled": True,
                "checkpoint_dir": self.output,
                "model_save_format": "safetensors" if self.is_exported else "torch_save",
                "save_consolidated": self.is_exported,
            },
            "distributed": distributed,
            "loss_fn": {"_target_": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy"},
            "dataset": {
                "_target_": "nemo_automodel.components.datasets.llm.mock.build_unpacked_dataset",
                "num_sentences": 64,
                "mean_len": 12.0,
                "vocab_size": 61,
                "max_sentence_len": 16,
                "tokenizer": None,
            },
            "dataloader": {
                "_target_": "torchdata.stateful_dataloader.StatefulDataLoader",
                "collate_fn": "nemo_automodel.components.datasets.utils.default_collater",
                "shuffle": False,
            },
            "optimizer": {"_target_": "torch.optim.AdamW", "lr": 0.01, "eps": 1e-3},
            "clip_grad_norm": {"max_norm": 0.5},
        }


_FP32 = {
    "_target_": "torch.distributed.fsdp.MixedPrecisionPolicy",
    "param_dtype": "torch.float32",
    "reduce_dtype": "torch.float32",
}


def train(run: Run) -> Results:
    """Run the recipe on this rank, sharded by this package unless it is FSDP2's. Collective."""
    from nemo_automodel.components.config.loader import ConfigNode
    from nemo_automodel.recipes.llm.train_ft import TrainFinetuneRecipeForNextTokenPrediction

    logged: list[dict[str, Any]] = []
    output = io.StringIO()
    if run.zero_dp_strategy is not None:
        megatron_fsdp_v2_for.automodel.install()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            recipe = TrainFinetuneRecipeForNextTokenPrediction(ConfigNode(run.recipe))
            recipe.setup()
            recipe.log_train_metrics = lambda sample: logged.append(sample.metrics)
            recipe.run_train_validation_loop()
    finally:
        megatron_fsdp_v2_for.automodel.uninstall()
    losses, norms = (
        [torch.tensor(float(metrics[name])) for metrics in logged] for name in ("loss", "grad_norm")
    )
    (model,) = recipe.model_parts
    assert isinstance(model, FSDPModule) is (run.zero_dp_strategy is not None)
    return results_of(losses, norms, full_parameters(model))
