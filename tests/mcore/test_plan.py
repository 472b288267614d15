"""Plans of Megatron's flags: rejected flags, and planned values compared with trainings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_fsdp_v2.diagnostics import Role, group_summary
from megatron_fsdp_v2.plan import Strategy
from megatron_fsdp_v2.plan.planner import plan_one
from tests.cases import longer, quick_only
from tests.distributed.wrapping import count_collectives
from tests.mcore import flags as f
from tests.mcore import planned
from tests.mcore.session import train
from tests.ranks import RankPools

STEPS = 2
ONE_NODE = f"--train-iters {STEPS} {f.OVERLAP}"
EXPERTS = f"{f.ALLTOALL} {f.EP2}"
TRAININGS: dict[str, list[str]] = {
    "ZeRO-3, bf16, 3 micro-batches": f.fsdp(f.ZERO3, "--bf16"),
    "experts, Muon": f.fsdp(f.ZERO2, EXPERTS, "--optimizer muon"),
    "replicated, Muon": f.fsdp(f.NO_SHARD, "--optimizer muon"),
    "tensor parallel, ZeRO-1": f.fsdp(f.ZERO1, f.TP2),
    "latent attention, experts except in the first layer": f.fsdp(
        f.ZERO3, f.DEEPSEEK, "--moe-latent-size 32 --apply-layernorm-1p --mtp-num-layers 1"
    ),
    "pipeline of two": f.fsdp(f.ZERO3, f.PP2),
}
REJECTS = "Megatron rejects these flags: "
# Flags of eight ranks, and the expected error.
REJECTED = {
    "--num-attention-heads 3": REJECTS,
    "--tensor-model-parallel-size 8": f"{REJECTS}num_attention_heads (4) must be a multiple of",
    "--pipeline-model-parallel-size 4": REJECTS,
    "--tensor-model-parallel-size 3": "8 ranks cannot be divided by --tensor-model-parallel-size 3",
    "--global-batch-size 12": REJECTS,
    "--optimizer sgd": "--optimizer sgd cannot be used with",
}


@pytest.fixture(scope="module")
def described() -> dict[str, Any]:
    """Descriptions of all command lines of this module, by name."""
    single = f.words(f.MODEL_FLAGS, ONE_NODE)
    base = [*single, *f.fsdp(), "--global-batch-size", "16"]
    overlapping = f"{EXPERTS} --bf16 --overlap-moe-expert-parallel-comm"
    dense_first = "--num-layers 3 --moe-layer-freq [0,1,1]"
    more = {
        **{flags: flags for flags in (*REJECTED, "--no-such-flag")},
        "for GPUs": "--use-flash-attn --num-workers 8 --tp-comm-overlap",
        "overlapping": f"{overlapping} --delay-wgrad-compute",
        "overlapping, dense first layer": f"{overlapping} {dense_first}",
        "state in other dtypes": "--bf16 --use-precision-aware-optimizer --main-grads-dtype bf16 "
        "--exp-avg-dtype fp8 --exp-avg-sq-dtype bf16",
        "knobs": "--fsdp-unshard-prefetch-bytes 1MiB",
        "bf16": "--bf16",
        "FP8": "--bf16 --fp8-format e4m3 --fp8-recipe tensorwise --fp8-param-gather",
        "FP4": "--bf16 --fp4-format e2m1 --fp4-param-gather",
        "untied": "--untie-embeddings-and-output-weights",
        "offloaded": "--optimizer-cpu-offload --optimizer-offload-fraction 0.25",
    }
    calls = {name: ([*single, *flags], 2) for name, flags in TRAININGS.items()}
    calls |= {name: (f.words(base, flags), 8) for name, flags in more.items()}
    calls["without this package"] = (single, 2)
    calls["many"] = ([*base, "--global-batch-size", "8192"], 4096)
    return planned.described(calls)


def test_invalid_flags_are_rejected_with_the_original_error(described: dict[str, Any]) -> None:
    for flags, error in REJECTED.items():
        said = described[flags]
        assert isinstance(said, str), flags
        assert error in said
        assert said.rstrip() != error.rstrip()
    # One sentence, without Megatron's usage of 700 lines.
    assert described["--no-such-flag"] == "unrecognized arguments: --no-such-flag"
    assert "add --use-megatron-fsdp --use-fsdp-fully-shard-api" in described["without this package"]


def test_flags_become_the_attributes_of_a_stage(described: dict[str, Any]) -> None:
    def stage(name: str) -> Any:
        assert not isinstance(described[name], str), described[name]
        return described[name].stages[0]

    # Flags that only a GPU supports are accepted.
    assert [stage(name).meshes["dp"].num_ranks for name in ("for GPUs", "many")] == [8, 4096]
    assert [stage(name).offload_fraction for name in ("for GPUs", "offloaded")] == [0.0, 0.25]
    for name, nbytes in (("bf16", None), ("knobs", 1 << 20)):
        assert stage(name).options.unshard_prefetch_bytes == nbytes
    for name, extra in (("overlapping", 0), ("overlapping, dense first layer", 1)):
        assert stage(name).num_extra_gathered == extra


def test_4_bit_weights_are_planned_with_half_a_byte(described: dict[str, Any]) -> None:
    gathered = {}
    for name in ("bf16", "FP8", "FP4"):
        assert not isinstance(described[name], str), described[name]
        plan = plan_one(described[name].stages[0], Strategy("optim_grads_params"))
        (gathered[name],) = (unit.gathered_nbytes for unit in plan.units if unit.count == 2)
    # Queries, keys, values, projection, both of the MLP; norms and biases are always in bf16.
    products = (3 + 1 + 4 + 4) * 64 * 64
    assert gathered["FP8"] - gathered["FP4"] == products // 2
    assert gathered["bf16"] - gathered["FP4"] > 3 * products // 2


def test_adam_state_is_planned_in_its_own_dtypes(described: dict[str, Any]) -> None:
    found = described["state in other dtypes"]
    assert not isinstance(found, str), found
    stage = found.stages[0]
    assert stage.optimizer_dtype == (torch.uint8, torch.bfloat16)
    assert stage.policy.main_grads_dtype == torch.bfloat16
    plain = replace(stage, optimizer_dtype=None)
    strategy = Strategy("optim_grads_params")
    kept, full = (plan_one(each, strategy).peak[Role.OPTIMIZER] for each in (stage, plain))
    # 3 bytes of every element instead of 8.
    assert kept * 8 == full * 3


def test_the_root_has_neither_embedding_nor_output_layer(described: dict[str, Any]) -> None:
    tied, untied = (described[name].stages[0] for name in ("for GPUs", "untied"))
    for stage in (tied, untied):
        units = {unit.name: unit for unit in stage.units}
        root, embedding, output = (units[name] for name in ("", "embedding", "output_layer"))
        # The root has only the final norm.
        assert max(len(param.shape) for param in root.params) == 1
        assert "word_embeddings.weight" in [param.name for param in embedding.params]
    assert not output.tied and [param.name for param in output.params] == ["weight"]
    # The embedding has the tied weight, which is gathered for the output layer as well.
    output = {unit.name: unit for unit in tied.units}["output_layer"]
    assert not output.params and output.tied == (("embedding", "word_embeddings.weight"),)


def test_planned_activations_depend_on_the_kind_of_layer(described: dict[str, Any]) -> None:
    (stage,) = described["latent attention, experts except in the first layer"].stages
    kept = {unit.name: unit.activation_nbytes for unit in stage.units}
    dense, expert = (kept[f"decoder.layers.{number}"] for number in (0, 1))
    # Elements per token: inputs of two norms, of projections and of the MLP; latents before and
    # after their norms, and rotary keys; four heads' queries, keys, values twice. Gate, up
    # projection and their product; for an expert also its input in the latent space.
    attention = 4 * 64 + 2 * (24 + 16) + 8 + 4 * (24 + 24 + 12 + 12)
    tokens, nbytes = 32 * 2, 4
    assert dense == tokens * nbytes * (attention + 3 * 128)
    assert expert == tokens * nbytes * (attention + 2 * (32 + 3 * 64) + 3 * 64)


def test_planned_units_do_not_depend_on_the_number_of_ranks(described: dict[str, Any]) -> None:
    few, many = described["for GPUs"].stages[0], described["many"].stages[0]
    assert many.units == few.units


def _counted(flags: Sequence[str]) -> tuple[dict[str, int], Counter[Any]]:
    """Train; return this rank's bytes by role at the end, and the collectives of one step."""
    # Kinds of axes are not distinguished: none of them is the given one.
    with count_collectives([None]) as counts:
        result = train(flags, _bytes_by_role)
    assert all(count % STEPS == 0 for count in counts.values()), counts
    in_a_step = {
        (kind, size, nbytes): count // STEPS for (kind, _, size, nbytes), count in counts.items()
    }
    return result.extras, Counter(in_a_step)


def _bytes_by_role(chunks: Any, optimizer: Any) -> dict[Role, int]:
    from tests.distributed.test_plan import state_bytes

    summaries = [group_summary(chunk) for chunk in chunks]
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return {
        Role.MAIN_WEIGHT: sum(summary.total("main_weight_nbytes") for summary in summaries),
        Role.MODEL_WEIGHT: sum(summary.total("model_weight_nbytes") for summary in summaries),
        Role.OPTIMIZER: sum(state_bytes(part.optimizer)["optimizer"] for part in parts),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", quick_only(TRAININGS, "experts, Muon", "pipeline of two"))
def test_plan_matches_bytes_and_collectives_of_megatrons_training(
    name: str, described: dict[str, Any], megatron: RankPools
) -> None:
    source = described[name]
    assert not isinstance(source, str), source
    results = megatron(2).run(_counted, f.words(f.MODEL_FLAGS, ONE_NODE, TRAININGS[name]))
    for number, stage in enumerate(source.stages):
        plan = plan_one(stage, source.strategy)
        # Ranks of one stage are neighbors.
        per_stage = len(results) // len(source.stages)
        ranks = results[number * per_stage : (number + 1) * per_stage]
        for role in ranks[0][0]:
            measured = max(found[role] for found, _ in ranks)
            assert plan.peak[role] == pytest.approx(measured, rel=0.01), (number, role)
        counts: Counter[Any] = Counter()
        for collective, count in plan.step.collectives.items():
            counts[collective.kind, collective.size, collective.nbytes] += count
        assert counts in [sent for _, sent in ranks], number


@pytest.mark.parametrize("strategy", [f.ZERO2, longer(f.ZERO1)])
def test_without_overlap_a_group_is_reduced_once_in_a_step_or_a_micro_batch(
    strategy: str, megatron: RankPools
) -> None:
    for number in (1, 3):
        steps = f"--train-iters {STEPS} --global-batch-size {4 * number}"
        for _, sent in megatron(2).run(_counted, f.words(f.MODEL_FLAGS, steps, f.fsdp(strategy))):
            reduced = sum(count for (kind, *_), count in sent.items() if "reduce" in kind)
            # The embedding, two layers and the final norm of the root; and flags.
            assert reduced == 5 * (number if strategy == f.ZERO2 else 1)
