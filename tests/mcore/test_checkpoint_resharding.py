"""A checkpoint saved at some parallel sizes loads at any other, value by value and loss by loss."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import FileSystemReader

from tests.cases import longer
from tests.mcore import flags as f
from tests.mcore.checkpoint_values import digests, together
from tests.mcore.session import Training, distance, train
from tests.mcore.trained import trained
from tests.ranks import RankPools

STEPS = "--train-iters 4 --global-batch-size 16 --num-layers 4 --use-cpu-initialization"
_PADDED = {
    size: f"--tensor-model-parallel-size {size} --make-vocab-size-divisible-by {512 // size}"
    for size in (1, 2)
}
_MOE = f"{f.ALLTOALL} --moe-router-load-balancing-type none"
_VIRTUAL = f"{f.PP2} --num-layers-per-virtual-pipeline-stage 1"
_BIASED = (
    f"{_MOE} --moe-router-enable-expert-bias --moe-router-score-function sigmoid"
    " --moe-shared-expert-intermediate-size 32"
)


def _sizes(
    *, tp: int = 1, pp: str = "", ep: int = 1, etp: int = 1, strategy: str = f.ZERO3
) -> list[str]:
    expert_tensor = f"--expert-tensor-parallel-size {etp}" if etp != tp else ""
    experts = f"--expert-model-parallel-size {ep} {expert_tensor}"
    return f.fsdp(strategy, _PADDED[tp], pp, experts)


_HSDP = f.HSDP.split()

# Model, where it is saved, where it is loaded: ranks and parallel sizes.
CASES: dict[str, tuple[str, tuple[int, list[str]], list[tuple[int, list[str]]]]] = {
    "tensor-gated": (
        f.GATED,
        (4, _sizes(tp=2, etp=2)),
        [(2, _sizes()), (4, _sizes()), (2, _sizes(tp=2, etp=2))],
    ),
    "pipeline-tied": (
        "",
        (4, _sizes(pp=f.PP2)),
        [(2, _sizes()), (2, _sizes(pp=f.PP2)), (4, _sizes(tp=2, etp=2, pp=f.PP2))],
    ),
    "one-stage": (
        "--untie-embeddings-and-output-weights",
        (2, _sizes()),
        [(2, _sizes(pp=f.PP2)), (2, _sizes(pp=_VIRTUAL))],
    ),
    "virtual": (
        "",
        (2, _sizes(pp=_VIRTUAL)),
        [(2, _sizes()), (4, _sizes(pp=_VIRTUAL, strategy="optim"))],
    ),
    "experts": (
        _BIASED,
        (4, _sizes(ep=2)),
        [(2, _sizes()), (4, _sizes(ep=4)), (2, _sizes(pp=f.PP2))],
    ),
    "experts-tensor": (
        f"{_MOE} --normalization RMSNorm",
        (4, [*_sizes(tp=2, etp=1, ep=2), "--sequence-parallel"]),
        [(2, _sizes()), (4, [*_sizes(tp=2, etp=2), "--sequence-parallel"])],
    ),
    "multi-token": (f.MTP, (2, _sizes(pp=f.PP2)), [(1, _sizes()), (2, _sizes(pp=f.PP2))]),
    "one-stage-multi-token": (f.MTP, (2, _sizes()), [(2, _sizes(pp=f.PP2))]),
    "hybrid-sharding": (
        f.GATED,
        (4, [*_sizes(), *_HSDP]),
        [(2, _sizes()), (2, _sizes(strategy="no_shard"))],
    ),
    "replicated": (
        "",
        (2, _sizes(strategy="no_shard")),
        [(4, [*_sizes(), *_HSDP]), (1, _sizes(strategy="optim"))],
    ),
}


Saved = Callable[[str], tuple[Path, Training]]


@pytest.fixture(scope="module")
def saved(megatron: RankPools, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Trains a case with checkpoints at iterations 2 and 4, once."""

    @functools.cache
    def run(case: str) -> tuple[Path, Training]:
        model, (world_size, sizes), _ = CASES[case]
        folder = tmp_path_factory.mktemp(case)
        flags = [STEPS, model, sizes, f.saving(folder, 2)]
        return folder, trained(megatron, world_size, *flags, probe=digests)

    return run


def _check_resumed(
    pools: RankPools, run: tuple[Path, Training], world_size: int, *flags: f.Flags, **options: Any
) -> None:
    """Check values that are loaded of the last iteration, and that the second one goes on."""
    folder, uninterrupted = run
    common = [STEPS, *flags]
    # What is loaded was trained to its end: there is no loss.
    command = f.words(f.MODEL_FLAGS, *common, f.loading(folder))
    loaded = pools(world_size).run(train, command, digests, **options)
    assert together([each.extras for each in loaded]) == together(uninterrupted.extras)
    resumed = trained(pools, world_size, *common, f.loading(folder, 2), iterations=2, **options)
    assert distance(resumed.losses, uninterrupted.losses[2:]) < 1e-6
    assert distance(resumed.grad_norms, uninterrupted.grad_norms[2:]) < 1e-5


@pytest.mark.parametrize(
    ("case", "number"),
    [(case, number) for case, (_, _, loads) in CASES.items() for number in range(len(loads))],
)
@pytest.mark.functional
def test_values_are_bit_equal_and_losses_go_on_at_other_sizes(
    megatron: RankPools, saved: Saved, case: str, number: int
) -> None:
    model, _, loads = CASES[case]
    world_size, sizes = loads[number]
    _check_resumed(megatron, saved(case), world_size, model, sizes)


def test_frozen_parameters_are_saved_without_optimizer_state(
    megatron: RankPools, tmp_path: Path
) -> None:
    save = [_sizes(pp=f.PP2), f.saving(tmp_path, 2)]
    frozen = {"freezes": ("mlp",)}
    whole = trained(megatron, 2, STEPS, "--swiglu", *save, probe=digests, **frozen)
    metadata = FileSystemReader(tmp_path / "iter_0000004").read_metadata()
    keys = [key for key in metadata.state_dict_metadata if "mlp" in key]
    assert keys
    assert all(key.startswith("model.") for key in keys)
    _check_resumed(megatron, (tmp_path, whole), 2, "--swiglu", _sizes(), **frozen)


def names(model: list[Any], optimizer: Any) -> list[tuple[str, bool]]:
    """What this rank's parameters are called, and which of them are copies."""
    del optimizer
    from megatron_fsdp_v2_mcore.checkpoint.names import canonical_parameter_names

    found = [name for name in canonical_parameter_names(model).values() if not name.is_unused]
    return [(key, name.is_copy) for name in found for key in name.keys]


@pytest.mark.parametrize(
    ("world_size", "spread", "model"),
    [
        pytest.param(2, f.PP2, "--num-layers 4", id="pipeline"),
        longer(2, _VIRTUAL, "--num-layers 4", id="virtual"),
        longer(2, _VIRTUAL, f"--num-layers 4 {f.UNTIED} --swiglu", id="virtual-untied"),
        longer(2, f.EP2, f.ALLTOALL, id="experts"),
        longer(2, f.PP2, f.MTP, id="mtp"),
        pytest.param(
            2, _VIRTUAL, f"{f.ALLTOALL} --num-layers 4 --micro-batch-size 1", id="virtual-moe"
        ),
    ],
)
def test_names_over_all_ranks_are_those_of_the_model_in_one_piece(
    megatron: RankPools, world_size: int, spread: str, model: str
) -> None:
    flags = ["--train-iters 1", f.fsdp(), model]
    whole = [key for key, _ in trained(megatron, 1, *flags, probe=names).extras[0]]
    assert max(Counter(whole).values()) == 1
    ranks = trained(megatron, world_size, *flags, spread, probe=names).extras
    owned = [key for rank in ranks for key, is_copy in rank if not is_copy]
    assert set(owned) == set(whole)
    if "--expert" not in spread:
        assert len(owned) == len(whole)
    copies = {key for rank in ranks for key, is_copy in rank if is_copy}
    assert copies <= {"embedding.word_embeddings.weight"}
    assert bool(copies) == ("--untie" not in model and "--pipeline" in spread)
