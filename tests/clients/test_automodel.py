"""nemo-automodel's Megatron-FSDP strategy, sharded by this package.

It trains as without sharding, and its recipes as with FSDP2.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

import megatron_fsdp_v2_for.automodel
from megatron_fsdp_v2.dtensor.sharded_rows import plain_of
from megatron_fsdp_v2.runtime.module import named_units
from tests.clients import automodel
from tests.clients.automodel import Run
from tests.clients.conftest import Measure, Record
from tests.clients.differences import difference_of, full_parameters, train_plain
from tests.clients.hf_models import MODELS
from tests.ranks import RankPools, rank_pools

COMPARED = "losses, norms, parameters of 3 steps of 2 micro-batches"
STEPS, MICRO = 3, 2
MAX_NORM = 0.5


NAMES = ("dp", "cp", "tp")


def built() -> tuple[Any, Any]:
    torch.manual_seed(1)
    model = automodel.build("Llama tied")
    return model, lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-3)


@contextlib.contextmanager
def installed(strategy: str | None = None) -> Iterator[None]:
    megatron_fsdp_v2_for.automodel.install(strategy)
    try:
        yield
    finally:
        megatron_fsdp_v2_for.automodel.uninstall()


def parallelized(zero_dp_strategy: int, tp_size: int = 1) -> tuple[Any, Any]:
    """Shard a model, then its optimizer, as automodel's recipes do."""
    from nemo_automodel.components.distributed import config, megatron_fsdp

    settings = config.MegatronFSDPConfig(
        zero_dp_strategy=zero_dp_strategy, check_for_nan_in_grad=False
    )
    mesh = init_device_mesh("cpu", (2, 1, tp_size), mesh_dim_names=NAMES)
    model, optimizer_of = built()
    model, _ = megatron_fsdp.parallelize_megatron_fsdp(model, settings, mesh)
    attributes = megatron_fsdp.snapshot_distributed_param_attrs(model)
    megatron_fsdp.restore_distributed_param_attrs(model, attributes)
    optimizer = megatron_fsdp.maybe_shard_optimizer(
        model, optimizer_of(model.parameters()), settings
    )
    return model, optimizer


def difference(zero_dp_strategy: int, strategy: str | None = None) -> float:
    with installed(strategy):
        model, optimizer = parallelized(zero_dp_strategy)
    assert len(named_units(model)) == 3
    plain, optimizer_of = built()

    def loss_of(of: Any, step: int, micro: int, ranks: list[int]) -> torch.Tensor:
        batches = [MODELS["Llama tied"].batch(100 * step + 10 * micro + rank) for rank in ranks]
        return torch.stack([of(**batch).loss for batch in batches]).mean()

    def steps(of: Any, ranks: list[int]) -> Any:
        return [
            [partial(loss_of, of, step, micro, ranks) for micro in range(MICRO)]
            for step in range(STEPS)
        ]

    ours = train_plain(model, steps(model, [dist.get_rank()]), optimizer, MAX_NORM)
    wanted = train_plain(plain, steps(plain, [0, 1]), optimizer_of(plain.parameters()), MAX_NORM)
    losses = ours["losses"].clone()  # type: ignore[union-attr]
    dist.all_reduce(losses)
    return difference_of({**ours, "losses": losses / 2}, wanted)


@pytest.mark.parametrize("zero_dp_strategy", range(4))
def test_llama_trains_like_unsharded(measure: Measure, zero_dp_strategy: int) -> None:
    measure("nemo-automodel", COMPARED, 2, difference, zero_dp_strategy)


def test_llama_trains_with_the_strategy_given_to_install(measure: Measure) -> None:
    measure("nemo-automodel", COMPARED, 2, difference, 3, "optim")


# -- recipes --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recipes() -> Iterator[RankPools]:
    """Yield rank pools by world size, forked from a process that has imported the recipe."""
    if not hasattr(FSDPParam, "to_accumulated_grad_if_needed"):
        pytest.skip("automodel 0.7 can neither import recipes nor use FSDP2 with torch 2.15")
    with rank_pools(["tests.clients.preloaded_automodel"]) as pools:
        yield pools


def recipe_difference(run: Run, fsdp2: Run, first: int, is_theirs: bool) -> float:
    """Difference of a training from FSDP2's, whose steps before `first` are another training's."""
    theirs = dict(automodel.train(fsdp2))
    if first:
        zero_dp_strategy = None if is_theirs else run.zero_dp_strategy
        automodel.train(dataclasses.replace(run, zero_dp_strategy=zero_dp_strategy, steps=first))
    for name in ("losses", "norms"):
        theirs[name] = theirs[name][first:]  # type: ignore[index]
    return difference_of(automodel.train(run), theirs)


@pytest.mark.parametrize(
    ("zero_dp_strategy", "name", "sizes", "resumes_at", "is_theirs"),
    [
        (0, "Llama tied", {}, 0, False),
        (1, "Llama", {}, 2, True),
        (2, "Llama tied", {}, 0, False),
        (3, "Llama", {}, 0, False),
        (3, "Llama tied", {}, 2, False),
        (1, "Llama tied", {"tp_size": 2}, 2, False),
        (3, "Llama", {"tp_size": 2}, 2, True),
        (3, "Llama tied", {"cp_size": 2}, 2, False),
    ],
)
def test_recipe_trains_and_resumes_like_fsdp2(
    recipes: RankPools,
    record: Record,
    tmp_path: Path,
    zero_dp_strategy: int,
    name: str,
    sizes: dict[str, int],
    resumes_at: int,
    is_theirs: bool,
) -> None:
    model = str(tmp_path / "model")
    automodel.save_model(model, name)
    run, fsdp2 = (
        Run(model, str(tmp_path / f"{strategy}"), strategy, **sizes)
        for strategy in (zero_dp_strategy, None)
    )
    ranks = recipes(4 if sizes else 2)
    found = ranks.run(recipe_difference, run, fsdp2, resumes_at, is_theirs, timeout_s=120)
    record("nemo-automodel", "losses, norms, parameters of 4 steps of a recipe", max(found))


def exported_difference(run: Run) -> float:
    trained = automodel.train(run)["parameters"]
    found = MODELS["Llama tied"].cls.from_pretrained(f"{run.output}/LATEST/model/consolidated")
    return difference_of({"parameters": full_parameters(found)}, {"parameters": trained})


def test_recipe_exports_weights_for_transformers(
    recipes: RankPools, record: Record, tmp_path: Path
) -> None:
    model = str(tmp_path / "model")
    automodel.save_model(model, "Llama tied")
    run = Run(model, str(tmp_path / "run"), 3, steps=2, tp_size=2, is_exported=True)
    found = recipes(4).run(exported_difference, run)
    record("nemo-automodel", "parameters that transformers loads", max(found), at_most=0)


def replicas_error() -> float:
    """Fill replicas with unlike values; return the largest error after automodel unites them."""
    from nemo_automodel.components.distributed import tp_replicas

    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=NAMES)
    rank, error = mesh.get_local_rank("tp"), 0.0
    with installed():
        model, _ = parallelized(3, tp_size=2)
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
            for tensor in (param, param.grad):
                plain_of(tensor).detach().fill_(rank)
        tp_replicas.broadcast_tp_replicas([model], mesh)
        tp_replicas.synchronize_tp_replica_gradients([model], mesh)
    for name, param in model.named_parameters():
        wanted = (0, 0.5) if "norm" in name else (rank, rank)
        for tensor, value in zip((param, param.grad), wanted, strict=True):
            error = max(error, *(plain_of(tensor).detach() - value).abs().flatten().tolist(), 0.0)
    return error


def test_tensor_parallel_replicas_are_kept_equal(measure: Measure) -> None:
    measure(
        "nemo-automodel", "replicas of norms, and their gradients", 4, replicas_error, at_most=0
    )
