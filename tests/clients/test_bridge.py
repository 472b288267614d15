"""Recipes of Megatron-Bridge, sharded by this package, train as with Megatron's DDP."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import megatron_fsdp_v2_for.bridge
from megatron_cpu_rehearsal.te.load import find
from tests.clients import bridge
from tests.clients.bridge import Run
from tests.clients.conftest import Record
from tests.clients.differences import difference_of
from tests.ranks import RankFailure, RankPools, rank_pools

CLIENT = "megatron-bridge"
COMPARED = "losses, norms, exported weights"
ZERO3 = "optim_grads_params"
TIMEOUT_S = 240.0
EXPERTS = {"expert_model_parallel_size": 2}
SEQUENTIAL = {**EXPERTS, "moe_grouped_gemm": False}
STAGES = {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}
TENSOR = {"tensor_model_parallel_size": 2}
SEQUENCE = {**TENSOR, "sequence_parallel": True}
LORA = {"dim": 4, "alpha": 8}
INTERLEAVES = "moe_mlp_glu_interleave_size"
CANONICAL = {**LORA, "type": "canonical_lora"}
CANONICAL_FC1 = {**CANONICAL, "target_modules": ["linear_fc1_up", "linear_fc1_gate"]}
DORA = {**LORA, "type": "dora"}
DORA_OF_COLUMNS = {**DORA, "target_modules": ["linear_qkv", "linear_fc1"]}
OWN_ADAPTERS = {**LORA, "share_expert_adapters": False}
RECOMPUTES = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
CHANGES: dict[str, dict[str, Any]] = {
    "averaged in collectives": {
        "config": {
            "ddp.average_in_collective": True,
            "ddp.disable_symmetric_registration": True,
            "ddp.grad_reduce_in_fp32": False,
            "optimizer.use_distributed_optimizer": False,
        }
    },
    "evaluated in between": {
        "config": {
            "dataset.split": "4,4,2",
            "validation.eval_iters": 1,
            "validation.eval_interval": 2,
            "model.gradient_accumulation_fusion": True,
        }
    },
    "hybrid": {"config": {"ddp.num_distributed_optimizer_instances": 2}},
    "expert-parallel": {"model": EXPERTS},
    "tensor-parallel": {"model": TENSOR},
    "in stages": {"model": STAGES},
    "adapters, recomputed": {"adapters": LORA, "model": RECOMPUTES},
    "adapters, tensor-parallel": {"adapters": LORA, "model": TENSOR},
    "adapters of every expert": {"adapters": OWN_ADAPTERS},
    "adapters, hybrid": {
        "adapters": LORA,
        "config": {
            "ddp.num_distributed_optimizer_instances": 2,
            "ddp.outer_dp_sharding_strategy": "optim",
        },
    },
    "adapters, in stages": {"adapters": LORA, "model": STAGES},
    "canonical adapters": {"adapters": {**OWN_ADAPTERS, **CANONICAL}},
    "DoRA": {"adapters": DORA},
}


@pytest.fixture(scope="module")
def recipes() -> Iterator[RankPools]:
    """Yield rank pools by world size, forked from a process that has imported Megatron-Bridge."""
    with (
        rank_pools(["tests.clients.preloaded_bridge"]) as pools,
        pytest.MonkeyPatch.context() as patch,
    ):
        # Ranks have the path of this process. Adapters read the version of Transformer Engine.
        patch.setattr(sys, "path", [*sys.path, str(find())])
        yield pools


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the folders of models of Hugging Face by name; `other` is another dense one."""
    folders = {kind: str(tmp_path_factory.mktemp(kind)) for kind in ("dense", "tied", "experts")}
    for kind, folder in folders.items():
        bridge.save_model(folder, kind)
    folders["other"] = str(tmp_path_factory.mktemp("other"))
    bridge.save_model(folders["other"], "dense", seed=2)
    return folders


def difference(run: Run, theirs: Run) -> float:
    """Return the difference of the last iterations of two trainings."""
    ours, others = bridge.train(run), bridge.train(theirs)
    steps = 4 if not run.load else 2
    for name in ("losses", "norms"):
        others[name] = others[name][-steps:]
    return difference_of(ours, others)


@pytest.mark.parametrize(
    ("ranks", "kind", "strategy", "changes"),
    [
        (2, "dense", ZERO3, "averaged in collectives"),
        (2, "dense", "optim", "evaluated in between"),
        (4, "dense", ZERO3, "hybrid"),
        (2, "experts", ZERO3, "expert-parallel"),
        (4, "experts", "optim", "expert-parallel"),
        (4, "dense", "optim_grads", "tensor-parallel"),
        (4, "tied", ZERO3, "in stages"),
        (2, "dense", "optim", "adapters, recomputed"),
        (4, "dense", ZERO3, "adapters, tensor-parallel"),
        (2, "experts", ZERO3, "adapters of every expert"),
        (4, "dense", ZERO3, "adapters, hybrid"),
        (4, "tied", ZERO3, "adapters, in stages"),
        (2, "experts", ZERO3, "canonical adapters"),
        (2, "dense", "optim", "DoRA"),
    ],
)
def test_recipe_trains_like_megatrons_ddp(
    recipes: RankPools,
    models: dict[str, str],
    record: Record,
    ranks: int,
    kind: str,
    strategy: str,
    changes: str,
) -> None:
    run = Run(models[kind], strategy, **CHANGES[changes])
    found = recipes(ranks).run(difference, run, run.plain, timeout_s=TIMEOUT_S)
    record(CLIENT, COMPARED, max(found))


@pytest.mark.parametrize("adapters", [LORA, CANONICAL], ids=["LoRA", "canonical"])
def test_adapters_train_with_sequence_parallelism_as_without(
    recipes: RankPools, models: dict[str, str], record: Record, adapters: dict[str, Any]
) -> None:
    # With Megatron's DDP, the gradient of the adapters' inputs is lost.
    plain = Run(models["dense"], adapters=adapters, model=TENSOR).plain
    run = Run(models["dense"], ZERO3, adapters=adapters, model=SEQUENCE)
    found = recipes(4).run(difference, run, plain, timeout_s=TIMEOUT_S)
    record(CLIENT, COMPARED, max(found))


def test_adapters_of_fp8_weights_train_like_megatrons_ddp(
    recipes: RankPools, models: dict[str, str], record: Record
) -> None:
    run = Run(
        models["dense"],
        ZERO3,
        adapters=LORA,
        precision="bf16_with_fp8_current_scaling_mixed",
        config={"optimizer.clip_grad": 0.0, "mixed_precision.fp8_param_gather": True},
    )
    found = recipes(2).run(difference_of_losses, run, timeout_s=TIMEOUT_S)
    record(CLIENT, "losses", max(found))


@pytest.mark.parametrize("is_packed", [False, True], ids=["padded", "packed"])
def test_fine_tuning_trains_like_megatrons_ddp(
    recipes: RankPools,
    models: dict[str, str],
    record: Record,
    tmp_path: Path,
    is_packed: bool,
) -> None:
    bridge.save_prompts(str(tmp_path))
    run = Run(models["dense"], ZERO3, sft=str(tmp_path), is_packed=is_packed, adapters=LORA)
    found = recipes(2).run(difference, run, run.plain, timeout_s=TIMEOUT_S)
    record(CLIENT, COMPARED, max(found))


def test_muon_on_several_ranks_trains_like_on_one(
    recipes: RankPools, models: dict[str, str], record: Record
) -> None:
    # With Megatron's DDP, ranks clip by different gradient norms.
    run = Run(models["dense"], ZERO3, adapters=LORA, config={"optimizer.optimizer": "muon"})
    ours = recipes(2).run(bridge.train, run, timeout_s=TIMEOUT_S)[0]
    theirs = recipes(1).run(bridge.train, run.plain, timeout_s=TIMEOUT_S)[0]
    record(CLIENT, COMPARED, difference_of(ours, theirs))


def difference_of_losses(run: Run) -> float:
    """Return the difference of the losses to those of Megatron's DDP."""
    ours, theirs = ({"losses": bridge.train(one)["losses"]} for one in (run, run.plain))
    return difference_of(ours, theirs)


@pytest.mark.parametrize(
    "precision",
    [
        "bf16_mixed",
        "bf16_with_fp8_current_scaling_mixed",
        "bf16_with_fp8_delayed_scaling_mixed",
    ],
)
def test_recipe_of_low_precision_trains_like_megatrons_ddp(
    recipes: RankPools, models: dict[str, str], record: Record, precision: str
) -> None:
    # The order of a norm's sum may change its last bit, and with it bf16 and FP8 weights.
    run = Run(models["dense"], ZERO3, precision=precision, config={"optimizer.clip_grad": 0.0})
    found = recipes(2).run(difference_of_losses, run, timeout_s=TIMEOUT_S)
    record(CLIENT, "losses", max(found))


@pytest.mark.parametrize(
    ("kind", "ranks", "changes", "others"),
    [
        ("dense", (2, 4), {}, {}),
        ("experts", (4, 2), {"model": EXPERTS}, {"model": EXPERTS}),
        ("dense", (4, 2), {"adapters": LORA, "model": TENSOR}, {"adapters": LORA}),
        (
            "dense",
            (2, 4),
            {"adapters": DORA_OF_COLUMNS},
            {"adapters": DORA_OF_COLUMNS, "model": TENSOR},
        ),
        ("dense", (4, 2), {"adapters": CANONICAL, "model": TENSOR}, {"adapters": CANONICAL}),
    ],
    ids=[
        "data-parallel",
        "expert-parallel",
        "adapters without tensor parallelism",
        "DoRA with tensor parallelism",
        "canonical adapters without tensor parallelism",
    ],
)
def test_recipe_resumes_at_another_size(
    recipes: RankPools,
    models: dict[str, str],
    record: Record,
    tmp_path: Path,
    kind: str,
    ranks: tuple[int, int],
    changes: dict[str, Any],
    others: dict[str, Any],
) -> None:
    saved = Run(models[kind], ZERO3, iterations=2, save=str(tmp_path), **changes)
    recipes(ranks[0]).run(bridge.train, saved, timeout_s=TIMEOUT_S)
    run = Run(models[kind], ZERO3, load=str(tmp_path), **others)
    found = recipes(ranks[1]).run(difference, run, saved.plain, timeout_s=TIMEOUT_S)
    record(CLIENT, f"{COMPARED} after a resume", max(found))


def test_dora_resumes_without_tensor_parallelism(
    recipes: RankPools, models: dict[str, str], record: Record, tmp_path: Path
) -> None:
    # Megatron's DDP leaves half of the magnitudes out of gradient norms.
    whole = Run(models["dense"], ZERO3, adapters=DORA_OF_COLUMNS, model=TENSOR)
    saved = dataclasses.replace(whole, iterations=2, save=str(tmp_path))
    resumed = dataclasses.replace(whole, load=str(tmp_path), model={})
    recipes(4).run(bridge.train, saved, timeout_s=TIMEOUT_S)
    ours = recipes(2).run(bridge.train, resumed, timeout_s=TIMEOUT_S)[0]
    theirs = recipes(4).run(bridge.train, whole, timeout_s=TIMEOUT_S)[0]
    for name in ("losses", "norms"):
        theirs[name] = theirs[name][-2:]
    record(CLIENT, f"{COMPARED} after a resume", difference_of(ours, theirs))


def test_pretrained_weights_are_those_of_the_checkpoint(
    recipes: RankPools, models: dict[str, str], record: Record, tmp_path: Path
) -> None:
    ends = {"train.exit_interval": 1}
    saved = Run(models["dense"], ZERO3, save=str(tmp_path), config=ends)
    recipes(2).run(bridge.train, saved, timeout_s=TIMEOUT_S)
    kept = {"optimizer.lr": 0.0, "optimizer.min_lr": 0.0}
    run = Run(models["dense"], ZERO3, iterations=1, pretrained=str(tmp_path), config=kept)
    found = recipes(2).run(bridge.train, run, timeout_s=TIMEOUT_S)[0]
    theirs = recipes(2).run(
        bridge.train, dataclasses.replace(saved.plain, iterations=1, config={}), timeout_s=TIMEOUT_S
    )[0]
    parameters = [{"parameters": one["parameters"]} for one in (found, theirs)]
    record(CLIENT, "exported weights", difference_of(*parameters))


def test_checkpoint_of_another_model_is_an_error(
    recipes: RankPools, models: dict[str, str], tmp_path: Path
) -> None:
    run = Run(models["dense"], ZERO3, iterations=1, save=str(tmp_path))
    recipes(2).run(bridge.train, run, timeout_s=TIMEOUT_S)
    deeper = Run(models["dense"], ZERO3, load=str(tmp_path), model={"num_layers": 3})
    with pytest.raises(RankFailure, match="is a checkpoint of another model"):
        recipes(2).run(bridge.train, deeper, timeout_s=TIMEOUT_S)


def difference_to_imported(run: Run, other: str) -> float:
    """Return the difference of a trained model to the model of Hugging Face that it then loads."""
    tokens = torch.arange(bridge.LENGTH).unsqueeze(0)

    def load(folder: str, model: Any) -> dict[str, torch.Tensor]:
        from megatron.bridge import AutoBridge

        AutoBridge.from_hf_pretrained(folder).load_hf_weights(model, other)
        with torch.no_grad():
            logits = model[0](tokens, tokens, None)
        return {**bridge.exported(folder, model), "logits": logits}

    theirs = transformers.AutoModelForCausalLM.from_pretrained(other)
    wanted = {name: param.detach() for name, param in theirs.named_parameters()}
    wanted["logits"] = theirs(tokens).logits.detach()
    return difference_of(
        {"parameters": bridge.train(run, load)["parameters"]}, {"parameters": wanted}
    )


@pytest.mark.parametrize("strategy", [ZERO3, "optim", "no_shard"])
def test_trained_model_loads_weights_of_hugging_face(
    recipes: RankPools, models: dict[str, str], record: Record, strategy: str
) -> None:
    run = Run(models["dense"], strategy, iterations=1)
    found = recipes(2).run(difference_to_imported, run, models["other"], timeout_s=TIMEOUT_S)
    record(CLIENT, "exported weights and logits after load_hf_weights", max(found))


def test_install_does_not_change_training_with_ddp(
    recipes: RankPools, models: dict[str, str], record: Record
) -> None:
    plain = Run(models["dense"]).plain
    installed = dataclasses.replace(plain, strategy=ZERO3)
    found = recipes(2).run(difference, installed, plain, timeout_s=TIMEOUT_S)
    record(CLIENT, COMPARED, max(found), at_most=0.0)


@pytest.mark.parametrize(
    ("kind", "adapters", "model", "message"),
    [
        ("experts", LORA, {}, "set share_expert_adapters=False"),
        ("experts", OWN_ADAPTERS, EXPERTS, "leave the experts out of target_modules"),
        ("experts", CANONICAL_FC1, SEQUENTIAL, "leave the experts out of target_modules"),
        ("dense", DORA, TENSOR, "leave linear_proj and linear_fc2 out of target_modules"),
    ],
    ids=[
        "shared by experts",
        "of experts, expert-parallel",
        "canonical, of experts, expert-parallel",
        "DoRA of rows, tensor-parallel",
    ],
)
def test_unsupported_adapters_are_rejected(
    recipes: RankPools,
    models: dict[str, str],
    kind: str,
    adapters: dict[str, Any],
    model: dict[str, Any],
    message: str,
) -> None:
    run = Run(models[kind], ZERO3, adapters=adapters, model=model)
    with pytest.raises(RankFailure, match=message):
        recipes(2).run(bridge.train, run, timeout_s=TIMEOUT_S)


def undo_and_reject(folder: str, torch_dist: str) -> None:
    """Install and uninstall on this rank; in between, try options that are not supported."""
    from megatron.bridge.training.config import runtime_config_update

    from megatron_fsdp_v2_mcore.flags.options import is_active

    targets = [patch.find() for patch in megatron_fsdp_v2_for.bridge.PATCHES["0.6"]]

    def current() -> list[Any]:
        return [vars(found[0])[found[1]] for found in targets if found is not None]

    before = current()
    megatron_fsdp_v2_for.bridge.install(expert_strategy="optim")
    try:
        assert len(before) == len(targets)
        assert not any(ours is theirs for ours, theirs in zip(current(), before, strict=True))
        for name, value in (
            ("async_save", True),
            ("non_persistent_ckpt_type", "local"),
            ("non_persistent_save_interval", 2),
        ):
            config = bridge.recipe(Run(folder, save=folder))
            setattr(config.checkpoint, name, value)
            with pytest.raises(ValueError, match=rf"CheckpointConfig\.{name} = {value!r}"):
                runtime_config_update(config)
        for run, message in (
            (Run(folder, pretrained=torch_dist), "saved as torch_dist; export it with AutoBridge"),
            (Run(folder, pretrained=torch_dist, adapters=LORA), "loaded before adapters are added"),
            (Run(folder, model={INTERLEAVES: 4}), f"{INTERLEAVES} cannot be used"),
        ):
            with pytest.raises(ValueError, match=message):
                runtime_config_update(bridge.recipe(run))
    finally:
        megatron_fsdp_v2_for.bridge.uninstall()
    assert all(ours is theirs for ours, theirs in zip(current(), before, strict=True))
    assert not is_active()


def test_install_is_undone_and_rejects_unsupported_options(
    recipes: RankPools, models: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    recipes(2).run(undo_and_reject, models["dense"], str(tmp_path), timeout_s=TIMEOUT_S)
