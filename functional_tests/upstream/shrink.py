"""Shrinks configurations of hundreds of GPUs to a few processes on a CPU.

Sizes become smaller. Axes of parallelism and all flags that affect the computation are kept.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

from functional_tests.upstream.configurations import Configuration

ITERATIONS = 4
MOST_RANKS = 8
NUM_MICROBATCHES = 2

Flags = dict[str, tuple[str, ...]]

_AXES = """
--tensor-model-parallel-size --pipeline-model-parallel-size --context-parallel-size
--expert-model-parallel-size --expert-tensor-parallel-size --num-distributed-optimizer-instances
--num-virtual-stages-per-pipeline-rank
"""
AXES = _AXES.split()
"""Sizes greater than 1 become 2, or 4 if 2 does not fit the other axes."""

_SIZES = """
--hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --num-query-groups 2
--kv-channels 16 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 2
--make-vocab-size-divisible-by 64 --mup-base-hidden-size 32
--num-experts 8 --moe-router-topk 2 --moe-router-num-groups 4 --moe-router-group-topk 2
--moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 32 --moe-latent-size 32
--mamba-num-heads 8 --mamba-head-dim 16
--q-lora-rank 32 --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16
--linear-key-head-dim 16 --linear-value-head-dim 16 --linear-num-key-heads 2
--linear-num-value-heads 4 --dsa-indexer-n-heads 4 --dsa-indexer-head-dim 16 --dsa-indexer-topk 8
--num-layers-per-virtual-pipeline-stage 1 --microbatch-group-size-per-virtual-pipeline-stage 3
--num-layers-at-end-in-bf16 1 --wgrad-deferral-limit 1 --manual-gc-interval 2 --eval-iters 1
--check-weight-hash-across-dp-replicas-interval 2
"""
SIZES = {name: int(size) for name, size in itertools.batched(_SIZES.split(), 2)}
"""Maximum value of each size."""

_FEW_STEPS = f"""
--lr 0.001 --min-lr 0.0001 --decoupled-lr 0.002 --decoupled-min-lr 0.0002
--lr-decay-iters {2 * ITERATIONS} --lr-warmup-iters 1 --eval-interval 1000
--error-injection-rate 1000000
"""
WITHIN_FEW_STEPS = dict(itertools.batched(_FEW_STEPS.split(), 2))
"""Values for a few iterations: weights must change, and the run must not end early."""

MAMBA = {"--mamba-state-dim": ("16",), "--mamba-head-dim": ("16",), "--mamba-num-groups": ("2",)}
"""Sizes of Mamba layers; Megatron's defaults are for larger models."""

PATTERNS = {"--hybrid-layer-pattern", "--hybrid-override-pattern"}

DATA = {
    **{"--mock-data": (), "--tokenizer-type": ("NullTokenizer",), "--vocab-size": ("256",)},
    **{"--seed": ("1",), "--log-interval": ("1",)},
}
LOSS_SCALE = "--initial-loss-scale"


@dataclass(frozen=True)
class Shrunk:
    """A shrunk configuration, which a few ranks train in seconds.

    Attributes:
        name: Name of the first configuration that becomes this one.
        names: Names of all configurations that become this one.
        world_size: Number of ranks.
        flags: The command line, without the flags that select this package.
    """

    name: str
    names: tuple[str, ...]
    world_size: int
    flags: tuple[str, ...]


def shrunk(configurations: list[Configuration]) -> list[Shrunk]:
    """Shrink configurations, and merge those that become equal."""
    found: dict[tuple[int, tuple[str, ...]], list[str]] = {}
    for configuration in configurations:
        flags = dict(configuration.flags)
        _shrink_axes(flags)
        _shrink_sizes(flags)
        world_size = _world_size(flags)
        _shrink_steps(flags, world_size)
        flags |= DATA
        if "--fp16" in flags:
            # With Megatron's default, all of the few steps would overflow.
            flags[LOSS_SCALE] = ("65536",)
        words = tuple(word for flag in sorted(flags) for word in (flag, *flags[flag]))
        found.setdefault((world_size, words), []).extend(configuration.names)
    return [
        Shrunk(names[0], tuple(names), world_size, words)
        for (world_size, words), names in found.items()
    ]


def _number(flags: Flags, name: str, default: int = 1) -> int:
    return int(flags[name][0]) if name in flags else default


def _shrink_axes(flags: Flags) -> None:
    tensor, pipeline, context, expert, expert_tensor = _sizes(flags)
    fits = tensor * context == expert * expert_tensor
    for name in AXES:
        if _number(flags, name) > 1:
            flags[name] = ("2",)
    if "--use-tp-pp-dp-mapping" in flags and fits:
        # This order of ranks requires as many replicas of experts as of dense parameters.
        tensor, _, context, expert, expert_tensor = _sizes(flags)
        if tensor * context < expert * expert_tensor:
            flags["--tensor-model-parallel-size"] = (str(expert * expert_tensor // context),)
        elif "--expert-tensor-parallel-size" in flags:
            flags["--expert-tensor-parallel-size"] = (str(tensor * context // expert),)
    if "--hierarchical-context-parallel-sizes" in flags:
        flags["--hierarchical-context-parallel-sizes"] = ("1", "2")
    if "--pipeline-model-parallel-layout" in flags:
        _shrink_layout(flags, pipeline)
    elif PATTERNS & flags.keys():
        _shrink_pattern(flags, *(PATTERNS & flags.keys()), pipeline)
    else:
        _shrink_layers(flags)


def _shrink_layers(flags: Flags) -> None:
    """Set two layers per stage, or one per virtual stage."""
    pipeline = _number(flags, "--pipeline-model-parallel-size")
    layers = 2 * pipeline
    if "--account-for-embedding-in-pipeline-split" in flags:
        # Embedding and loss count as layers of the first and last virtual stage.
        layers = 4 * pipeline - 2
    if "--decoder-first-pipeline-num-layers" in flags:
        flags["--decoder-first-pipeline-num-layers"] = ("1",)
        flags["--decoder-last-pipeline-num-layers"] = ("2",)
        layers = 3
    flags["--num-layers"] = (str(layers),)
    _shrink_frequency(flags, layers)


def _shrink_frequency(flags: Flags, layers: int) -> None:
    if "--moe-layer-freq" in flags:
        flags["--moe-layer-freq"] = (f"([0]*1+[1]*{layers - 1})",)


def _num_stages(flags: Flags, before: int, pipeline: int) -> int:
    """Return the number of stages after shrinking."""
    now = _number(flags, "--pipeline-model-parallel-size")
    return now if before <= pipeline else 2 * now


def _shrink_layout(flags: Flags, pipeline: int) -> None:
    """Keep the first stage, the last stage, and as many others as needed, with one layer each."""
    text = flags["--pipeline-model-parallel-layout"][0]
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(pattern, lambda found: found[1] * int(found[2]), text)
    stages = [re.sub("t+", "t", stage) for stage in text.split("|")]
    between = _num_stages(flags, len(stages), pipeline) - 2
    kept = [stages[0], *stages[1:-1][:between], stages[-1]]
    flags["--pipeline-model-parallel-layout"] = ("|".join(kept),)
    layers = sum(stage.count("t") for stage in kept)
    flags["--num-layers"] = (str(layers),)
    _shrink_frequency(flags, layers)


def _shrink_pattern(flags: Flags, name: str, pipeline: int) -> None:
    """Keep the first layer of each kind in every segment."""
    main, *predicted = flags[name][0].split("/")
    segments = ["".join(dict.fromkeys(segment)) for segment in main.split("|")]
    if len(segments) > 1:
        segments = segments[: _num_stages(flags, len(segments), pipeline)]
    flags[name] = ("/".join(["|".join(segments), *predicted]),)
    flags.pop("--num-layers", None)
    flags |= MAMBA


def _shrink_sizes(flags: Flags) -> None:
    for name, largest in SIZES.items():
        if name in flags:
            flags[name] = (str(min(_number(flags, name), largest)),)
    for name, value in WITHIN_FEW_STEPS.items():
        if name in flags:
            flags[name] = (value,)


def _sizes(flags: Flags) -> list[int]:
    """Return the sizes of the first five axes."""
    tensor, *others = (_number(flags, name) for name in AXES[:4])
    return [tensor, *others, _number(flags, AXES[4], tensor)]


def _world_size(flags: Flags) -> int:
    """Return the fewest ranks that fit all axes and shard weights, including those of experts."""
    tensor, pipeline, context, expert, expert_tensor = _sizes(flags)
    instances = _number(flags, "--num-distributed-optimizer-instances")
    world_size = tensor * pipeline * max(context, 2 * instances)
    if world_size > MOST_RANKS:
        world_size = tensor * pipeline * context
    if "--num-experts" in flags:
        world_size = max(world_size, pipeline * expert * expert_tensor)
        if 2 * expert * expert_tensor * pipeline <= MOST_RANKS:
            world_size = max(world_size, 2 * expert * expert_tensor * pipeline)
    return world_size


def _shrink_steps(flags: Flags, world_size: int) -> None:
    """Set a few iterations of a few micro-batches."""
    tensor, pipeline, context, *_ = _sizes(flags)
    replicas = world_size // (tensor * pipeline * context)
    micro = _number(flags, "--micro-batch-size") * replicas
    group = _number(flags, "--microbatch-group-size-per-virtual-pipeline-stage", 0)
    batch = micro * (group or max(NUM_MICROBATCHES, pipeline))
    samples = ITERATIONS * batch
    if "--step-batch-size-schedule" in flags:
        # Thresholds are in tokens. Half of the iterations have twice the samples.
        threshold = samples // 2 * _number(flags, "--seq-length")
        flags["--step-batch-size-schedule"] = (f"0:{batch} {threshold}:{2 * batch}",)
        samples += samples // 2
    else:
        flags["--global-batch-size"] = (str(batch),)
    if "--eval-global-batch-size" in flags:
        flags["--eval-global-batch-size"] = (str(batch),)
    for name in ("--lr-decay-samples", "--lr-wsd-decay-samples"):
        if name in flags:
            flags[name] = (str(2 * samples),)
    if _number(flags, "--lr-warmup-samples", 0) > 0:
        flags["--lr-warmup-samples"] = (str(batch),)
    if "--train-samples" in flags:
        flags["--train-samples"] = (str(samples),)
    else:
        flags["--train-iters"] = (str(ITERATIONS),)
