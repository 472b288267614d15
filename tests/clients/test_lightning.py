"""Training with Lightning's `ModelParallelStrategy` equals training without sharding."""

from __future__ import annotations

import itertools
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.clients.conftest import Measure
from tests.clients.differences import (
    Results,
    difference_of,
    full_copy,
    full_parameters,
    results_of,
    train_plain,
)
from tests.distributed.wrapping import wrap
from tests.reference.models import Block

STRATEGIES = ["optim", "optim_grads", "optim_grads_params"]
BATCH = 2
STEPS = 4
MICRO_BATCHES = 2


def plain_model() -> nn.Sequential:
    """Return a model with the same weights on every rank and in every run."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), Block(7), Block(7), nn.Linear(7, 3))


def samples(steps: int) -> TensorDataset:
    """Return the data of all ranks for `steps` steps, in order."""
    torch.manual_seed(4)
    number = steps * MICRO_BATCHES * BATCH * dist.get_world_size()
    return TensorDataset(torch.randn(number, 5), torch.randn(number, 3))


def shard(model: nn.Sequential, mesh: Any, strategy: str) -> nn.Sequential:
    """Shard a model as a user's `configure_model` or `parallelize_fn` does."""
    return wrap(model, list(model), mesh=mesh, sharding_strategy=strategy)


def lightning_module(strategy: str | None) -> Any:
    """Return a `LightningModule`, sharded or not, that records losses and gradient norms."""
    import lightning.pytorch as pl

    class Regression(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model: nn.Sequential | None = None
            self.losses: list[torch.Tensor] = []
            self.norms: list[torch.Tensor] = []

        def configure_model(self) -> None:
            if self.model is not None:
                return
            self.model = plain_model()
            if strategy is not None:
                shard(self.model, self.device_mesh["data_parallel"], strategy)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.02, eps=1e-3)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.8)
            schedule = {"scheduler": scheduler, "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": schedule}

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            x, y = batch
            loss = (self.model(x) - y).square().mean()
            self.log("loss", loss, sync_dist=True)
            self.losses.append(loss.detach())
            return loss

        def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
            x, y = batch
            self.log("validation", (self.model(x) - y).square().mean(), sync_dist=True)

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            norm = nn.utils.get_total_norm(
                [p.grad for p in self.parameters() if p.grad is not None]
            )
            self.norms.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    return Regression()


def trainer_for(strategy: str | None, *, steps: int, sharded_files: bool = True) -> Any:
    """Return a trainer of all ranks or, without a strategy, of this rank alone."""
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import ModelParallelStrategy

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    where: dict[str, Any] = {"devices": 1}
    if strategy is not None:
        where = {
            "devices": dist.get_world_size(),
            "plugins": [TorchElasticEnvironment()],
            "strategy": ModelParallelStrategy(
                data_parallel_size=dist.get_world_size(),
                tensor_parallel_size=1,
                save_distributed_checkpoint=sharded_files,
            ),
        }
    return pl.Trainer(
        accelerator="cpu",
        max_steps=steps,
        accumulate_grad_batches=MICRO_BATCHES,
        gradient_clip_val=0.3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        val_check_interval=MICRO_BATCHES,
        **where,
    )


def loaders(strategy: str | None, steps: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return the loaders for training and validation; ranks share the samples of each batch."""

    def loader(data: TensorDataset) -> DataLoader[Any]:
        if strategy is None:
            return DataLoader(data, batch_size=BATCH * dist.get_world_size())
        return DataLoader(data, BATCH, sampler=DistributedSampler(data, shuffle=False))

    return loader(samples(steps)), loader(samples(1))


def fitted(strategy: str | None, *, resumed: Path | None = None, **options: Any) -> Results:
    """Train two epochs; return losses, gradient norms, the validation loss and parameters.

    Args:
        strategy: The sharding strategy; None trains without sharding.
        resumed: If given, save a checkpoint here after the first epoch, rebuild all objects, and
            resume.
        options: Further options of the trainer.
    """
    steps = [STEPS] if resumed is None else [STEPS // 2, STEPS]
    losses, norms = [], []
    for number, last in enumerate(steps):
        module, trainer = lightning_module(strategy), trainer_for(strategy, steps=last, **options)
        trainer.fit(module, *loaders(strategy, STEPS // 2), ckpt_path=resumed if number else None)
        assert trainer.global_step == last
        losses += module.losses
        norms += module.norms
        if last < STEPS:
            trainer.save_checkpoint(resumed)
    found = results_of(losses, norms, full_parameters(module))
    if strategy is not None:
        # Without sharding, this rank trains on the samples of all ranks.
        mean = torch.stack(losses) / dist.get_world_size()
        dist.all_reduce(mean)
        found["losses"] = mean
    return found | {"validation": trainer.callback_metrics["validation"]}


def trainer_difference(strategy: str, files: str, folder: str) -> float:
    """Return the difference to Lightning without sharding, with or without resuming."""
    if files == "none":
        return difference_of(fitted(strategy), fitted(None))
    path = Path(folder) / "checkpoint"
    resumed = fitted(strategy, resumed=path, sharded_files=files == "sharded")
    assert path.is_dir() is (files == "sharded")
    return difference_of(resumed, fitted(None))


@pytest.mark.parametrize(
    ("files", "ranks"), [("none", 1), ("none", 2), ("sharded", 2), ("full", 2)]
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_trainer_with_clipping_accumulation_and_validation_matches_unsharded(
    measure: Measure, tmp_path: Path, strategy: str, files: str, ranks: int
) -> None:
    compared, arguments = "losses, norms, validation, parameters", (strategy, files, str(tmp_path))
    measure("lightning", compared, ranks, trainer_difference, *arguments)


def fabric_of(strategy: str, sharded_files: bool) -> Any:
    """Return a Fabric that shards the modules it sets up."""
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.fabric.strategies import ModelParallelStrategy

    fabric = Fabric(
        accelerator="cpu",
        devices=dist.get_world_size(),
        plugins=[TorchElasticEnvironment()],
        strategy=ModelParallelStrategy(
            lambda module, mesh: shard(module, mesh["data_parallel"], strategy),
            data_parallel_size=dist.get_world_size(),
            tensor_parallel_size=1,
            save_distributed_checkpoint=sharded_files,
        ),
    )
    fabric.launch()
    return fabric


def fabric_training(strategy: str, folder: Path, sharded_files: bool) -> Results:
    """Train in a loop with Fabric; return losses, norms and parameters.

    The model is built on the meta device and loads its first weights from a file. In the middle,
    a checkpoint is saved, all objects are rebuilt, and the checkpoint is loaded.
    """
    fabric = fabric_of(strategy, sharded_files)
    losses, norms = [], []
    batches = list(DataLoader(samples(STEPS), BATCH * dist.get_world_size()))
    for first in (0, STEPS // 2):
        with fabric.init_module(empty_init=True):
            model = plain_model()
        assert all(param.is_meta for param in model.parameters())
        model = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(
            torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-3)
        )
        if first == 0:
            fabric.load_raw(folder / "weights.pt", model)
        else:
            state = {"model": model, "optimizer": optimizer, "step": 0}
            fabric.load(folder / "checkpoint", state)
            assert state["step"] == first
        for step in range(first, first + STEPS // 2):
            for micro in range(MICRO_BATCHES):
                x, y = batches[step * MICRO_BATCHES + micro]
                own = slice(fabric.global_rank, None, fabric.world_size)
                with fabric.no_backward_sync(model, enabled=micro + 1 < MICRO_BATCHES):
                    loss = (model(x[own]) - y[own]).square().mean()
                    fabric.backward(loss / MICRO_BATCHES)
                losses.append(fabric.all_reduce(loss.detach()))
            norm = fabric.clip_gradients(model, optimizer, max_norm=0.3)
            norms.append(full_copy(norm))
            optimizer.step()
            optimizer.zero_grad()
        if first == 0:
            state = {"model": model, "optimizer": optimizer, "step": STEPS // 2}
            fabric.save(folder / "checkpoint", state)
    return results_of(losses, norms, full_parameters(model.module))


def plain_training() -> Results:
    """Run the same training in a loop of torch alone."""
    model = plain_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-3)
    batches = DataLoader(samples(STEPS), BATCH * dist.get_world_size())
    losses = [lambda x=x, y=y: (model(x) - y).square().mean() for x, y in batches]
    steps = itertools.batched(losses, MICRO_BATCHES)
    return train_plain(model, steps, optimizer, max_norm=0.3)


def fabric_difference(strategy: str, folder: str, sharded_files: bool) -> float:
    """Return the difference between a loop with Fabric and one of torch alone."""
    if dist.get_rank() == 0:
        torch.save(plain_model().state_dict(), Path(folder) / "weights.pt")
    dist.barrier()
    ours = fabric_training(strategy, Path(folder), sharded_files)
    return difference_of(ours, plain_training())


@pytest.mark.parametrize("files", ["sharded", "full"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fabric_loop_with_meta_device_and_resuming_matches_plain_loop(
    measure: Measure, tmp_path: Path, strategy: str, files: str
) -> None:
    arguments = (strategy, str(tmp_path), files == "sharded")
    measure("lightning", "losses, norms, parameters", 2, fabric_difference, *arguments)
