"""torchtitan's llama3, sharded by this package, trains as without sharding."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp

import megatron_fsdp_v2_for.torchtitan
from megatron_fsdp_v2.runtime.module import named_units
from tests.clients.conftest import Measure
from tests.clients.differences import Results, difference_of, full_parameters, results_of

COMPARED = "losses, norms, parameters of 4 steps"
BATCH = 2
LENGTH = 8
STEPS = 4
MAX_NORM = 0.5
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


def llama3() -> Any:
    """Return a small model of torchtitan with the same weights in every process."""
    from torchtitan.models.llama3 import Transformer, TransformerModelArgs

    sizes = {"dim": 16, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 61}
    args = TransformerModelArgs(**sizes, multiple_of=8, max_seq_len=LENGTH)
    torch.manual_seed(1)
    model = Transformer(args)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    return model


def job_config(folder: str = "", **sections: dict[str, Any]) -> Any:
    """Return a job's configuration for a CPU, with changed settings by section."""
    from torchtitan.config import JobConfig

    config = JobConfig()
    settings: dict[str, dict[str, Any]] = {
        "job": {"dump_folder": folder},
        "training": {"seq_len": LENGTH, "mixed_precision_param": "float32"},
        "activation_checkpoint": {"mode": "none"},
        # The default, fused, has no kernel for some CPUs.
        "optimizer": {"lr": 0.01, "eps": 1e-3, "implementation": "foreach"},
        "lr_scheduler": {"warmup_steps": 2},
        "checkpoint": {"enable": bool(folder), "interval": 1},
    }
    for name, changes in [*settings.items(), *sections.items()]:
        for key, value in changes.items():
            assert hasattr(getattr(config, name), key), f"{name}.{key}"
            setattr(getattr(config, name), key, value)
    return config


class Job:
    """Model, optimizer, schedule and checkpoints, built as torchtitan's trainer builds them.

    Attributes:
        ranks: Ranks whose data this process trains on.
    """

    def __init__(self, config: Any, *, replicas: int = 1, strategy: str = "") -> None:
        from torchtitan.components.checkpoint import CheckpointManager
        from torchtitan.components.lr_scheduler import build_lr_schedulers
        from torchtitan.components.optimizer import build_optimizers
        from torchtitan.distributed import ParallelDims
        from torchtitan.models.llama3.infra import parallelize

        size = dist.get_world_size()
        self.ranks = [dist.get_rank()] if strategy else list(range(size))
        dims = ParallelDims(replicas, size // replicas, 1, 1, 1, 1, 1, size)
        self.model = llama3()
        if strategy:
            # Without an accelerator, torchtitan assumes CUDA.
            with mock.patch("torchtitan.distributed.parallel_dims.device_type", "cpu"):
                dims.build_mesh()
            megatron_fsdp_v2_for.torchtitan.install(sharding_strategy=strategy)
            try:
                parallelize.parallelize_llama(self.model, dims, config)
            finally:
                megatron_fsdp_v2_for.torchtitan.uninstall()
            assert parallelize.fully_shard is fsdp.fully_shard
        self.optimizers = build_optimizers([self.model], config.optimizer, dims)
        self.schedules = build_lr_schedulers(self.optimizers, config.lr_scheduler, STEPS)
        self.checkpoints = CheckpointManager(
            dataloader=None,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedules,
            states={},
            checkpoint_config=config.checkpoint,
            sd_adapter=None,
            base_folder=config.job.dump_folder,
        )

    def train(self, steps: range) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Train; return the losses, summed over ranks, and the gradient norms of the steps.

        As in torchtitan, losses are divided by the total number of tokens, and FSDP sums gradients.
        """
        from torchtitan.distributed.utils import clip_grad_norm_

        losses, norms = [], []
        for step in steps:
            loss = sum(self._loss(step, rank) for rank in self.ranks)
            loss.backward()
            loss = loss.detach()
            if len(self.ranks) < dist.get_world_size():
                dist.all_reduce(loss)
            losses.append(loss)
            norms.append(clip_grad_norm_(self.model.parameters(), MAX_NORM, foreach=True))
            self.optimizers.step()
            self.schedules.step()
            self.optimizers.zero_grad()
        return losses, norms

    def _loss(self, step: int, rank: int) -> torch.Tensor:
        numbers = torch.Generator().manual_seed(100 * step + rank)
        tokens = torch.randint(0, 61, (BATCH, LENGTH + 1), generator=numbers)
        logits = self.model(tokens[:, :-1]).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum")
        return loss / (BATCH * LENGTH * dist.get_world_size())

    def results(self, losses: list[torch.Tensor], norms: list[torch.Tensor]) -> Results:
        """Return the results to compare."""
        parameters = full_parameters(self.model)
        for wrapper in _WRAPPERS:
            parameters = {name.replace(wrapper, ""): p for name, p in parameters.items()}
        return results_of(losses, norms, parameters)


def plain() -> Results:
    """Train unsharded on the data of all ranks."""
    job = Job(job_config())
    return job.results(*job.train(range(STEPS)))


def difference(
    replicas: int,
    sections: dict[str, Any],
    strategy: str = "optim_grads_params",
    folder: str = "",
) -> float:
    """Return the difference to unsharded training; with a folder, resume in the middle."""
    losses, norms = [], []
    half = STEPS // 2 if folder else STEPS
    for first in range(0, STEPS, half):
        job = Job(job_config(folder, **sections), replicas=replicas, strategy=strategy)
        # Units: embeddings, three blocks, and the norm with the output.
        assert len([unit for _, unit in named_units(job.model) if unit.groups]) == 5
        assert not folder or job.checkpoints.load() is bool(first)
        more = job.train(range(first, first + half))
        losses += more[0]
        norms += more[1]
        if folder:
            job.checkpoints.save(first + half)
            job.checkpoints.close()
    return difference_of(job.results(losses, norms), plain())


_SELECTIVE = {"mode": "selective", "selective_ac_option": "2"}
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "reshard_after_forward never": {"parallelism": {"fsdp_reshard_after_forward": "never"}},
    "full activation checkpointing": {"activation_checkpoint": {"mode": "full"}},
    "selective activation checkpointing": {"activation_checkpoint": _SELECTIVE},
    "activation checkpointing by operator": {
        "activation_checkpoint": _SELECTIVE | {"selective_ac_option": "op"}
    },
    "compiled blocks": {
        "compile": {"enable": True, "components": ["model"], "backend": "aot_eager"}
    },
}


@pytest.mark.parametrize(
    ("option", "replicas"), [*((option, 1) for option in OPTIONS), ("default", 2)]
)
def test_llama3_trains_like_unsharded(measure: Measure, option: str, replicas: int) -> None:
    measure("torchtitan", COMPARED, 2 * replicas, difference, replicas, OPTIONS[option])


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
def test_llama3_trains_with_the_strategy_given_to_install(measure: Measure, strategy: str) -> None:
    measure("torchtitan", COMPARED, 2, difference, 1, {}, strategy)


def test_job_resumes_from_its_checkpoint(measure: Measure, tmp_path: Path) -> None:
    measure("torchtitan", COMPARED, 2, difference, 1, {}, folder=str(tmp_path))
    assert (tmp_path / "checkpoint" / "step-4" / ".metadata").is_file()
