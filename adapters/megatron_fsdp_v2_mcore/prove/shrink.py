"""Shrinks configurations of hundreds of GPUs to a few processes on a CPU.

Sizes become smaller. Axes of parallelism and all flags that affect the computation are kept.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from megatron_fsdp_v2_mcore.flags.patterns import evaluate_pattern

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
TENSOR, PIPELINE, CONTEXT, EXPERT, EXPERT_TENSOR, INSTANCES, _ = AXES
DATA_PARALLEL = "data parallel"
"""The axis that no flag names: ranks that the other axes leave over."""

_TENSOR_FLAGS = """
--sequence-parallel --tp-comm-overlap --tp-comm-bulk-dgrad --tp-comm-bulk-wgrad
--tp-comm-overlap-ag --tp-comm-overlap-rs --disable-tp-comm-overlap-ag
--disable-tp-comm-overlap-rs --disable-tp-comm-bulk-dgrad --disable-tp-comm-bulk-wgrad
"""
_PIPELINE_FLAGS = """
--num-layers-per-virtual-pipeline-stage --num-virtual-stages-per-pipeline-rank
--pipeline-model-parallel-layout --decoder-first-pipeline-num-layers
--decoder-last-pipeline-num-layers --account-for-embedding-in-pipeline-split
--account-for-loss-in-pipeline-split --microbatch-group-size-per-virtual-pipeline-stage
--overlap-p2p-communication-warmup-flush --no-overlap-p2p-communication --use-tp-pp-dp-mapping
--defer-embedding-wgrad-compute --wgrad-deferral-limit --standalone-embedding-stage
"""
_OF_AXIS = {
    TENSOR: set(_TENSOR_FLAGS.split()),
    PIPELINE: set(_PIPELINE_FLAGS.split()),
    CONTEXT: {"--hierarchical-context-parallel-sizes", "--cp-comm-type"},
    EXPERT: {"--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute"},
    INSTANCES: {"--outer-dp-sharding-strategy"},
}
"""Flags that need more than one rank of an axis."""

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
_WIDTHS = """
--hidden-size --ffn-hidden-size --kv-channels --moe-ffn-hidden-size --moe-latent-size
--moe-shared-expert-intermediate-size --q-lora-rank --kv-lora-rank --qk-head-dim
--qk-pos-emb-head-dim --v-head-dim --seq-length --max-position-embeddings
"""
WIDTHS = set(_WIDTHS.split())
"""Sizes that are larger with FP8 or FP4, whose blocks have up to 128 elements."""
QUANTIZED = {"--fp8-format", "--fp4-format"}

_FEW_STEPS = f"""
--lr 0.001 --min-lr 0.0001 --decoupled-lr 0.002 --decoupled-min-lr 0.0002
--lr-decay-iters {2 * ITERATIONS} --lr-warmup-iters 1 --eval-interval 1000
--error-injection-rate 1000000
"""
WITHIN_FEW_STEPS = {name: value for name, value in itertools.batched(_FEW_STEPS.split(), 2)}
"""Values for a few iterations: weights must change, and the run must not end early."""

WEIGHT_DECAY, CLIP_GRAD = "--weight-decay", "--clip-grad"
AT_LEAST = {WEIGHT_DECAY: (0.01, 0.1), "--adam-eps": (1e-8, 1e-6)}
"""Megatron's default and the smallest value that is not 0: each term of an update must show in a
few steps. `eps` makes it depend on the size of a gradient, and so on clipping."""
SCHEDULED_DECAY = "--start-weight-decay", "--end-weight-decay"
MOST_CLIP_GRAD = 0.1
"""Largest norm of clipped gradients: those of every step are clipped."""

MAMBA = {"--mamba-state-dim": ("16",), "--mamba-head-dim": ("16",), "--mamba-num-groups": ("2",)}
"""Sizes of Mamba layers; Megatron's defaults are for larger models."""

PATTERNS = {"--hybrid-layer-pattern", "--hybrid-override-pattern"}

DATA = {
    **{"--mock-data": (), "--tokenizer-type": ("NullTokenizer",), "--vocab-size": ("256",)},
    **{"--seed": ("1",), "--log-interval": ("1",)},
}
LOSS_SCALE = "--initial-loss-scale"

_PLACES = """
--data-args-path --data-cache-path --data-path --load --merge-file --per-split-data-args-path --save
--split --tensorboard-dir --test-data-path --tiktoken-pattern --tokenizer-model --tokenizer-type
--train-data-path --valid-data-path --vocab-file --wandb-entity --wandb-exp-name --wandb-project
--wandb-save-dir
"""
_LOADING_AND_SAVING = """
--auto-detect-ckpt-format --ckpt-step --finetune --no-load-optim --no-load-rng --no-save-optim
--no-save-rng --no-use-tokenizer-model-from-checkpoint-args --override-opt_param-scheduler
--save-interval --save-retain-interval --use-checkpoint-args --use-checkpoint-opt_param-scheduler
"""
_LOGGING_AND_TIMING = """
--distributed-timeout-minutes --exit-duration-in-mins --exit-interval --exit-signal-handler
--inference-max-seq-length --log-energy --log-interval --log-memory-interval
--log-memory-to-tensorboard --log-progress --log-throughput --log-timers-to-tensorboard
--log-validation-ppl-to-tensorboard --logging-level --num-workers --seed --straggler-minmax-count
--tensorboard-log-interval --timing-log-level --timing-log-option
"""
NOT_RUN = frozenset(f"{_PLACES} {_LOADING_AND_SAVING} {_LOGGING_AND_TIMING}".split())
"""Flags of a job's files, its log and its end."""
_RAMPS = {"--rampup-batch-size", "--decrease-batch-size-if-needed"}


Axis = str
"""Name of an axis of parallelism: a flag of `AXES`, or `DATA_PARALLEL`."""


@dataclass(frozen=True, eq=False)
class ShrunkRun:
    """A shrunk configuration, which a few ranks train in seconds.

    Attributes:
        world_size: Number of ranks.
        axes: Axes with more than one rank.
        flags: The command line, with all flags that select a kind of data parallelism.
    """

    world_size: int
    axes: tuple[Axis, ...]
    flags: Flags


def parse_words(words: Sequence[str]) -> Flags:
    """Return the flags of a command line. Of a repeated flag, the last one counts.

    Raises:
        ValueError: The first word is no flag.
    """
    flags: Flags = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, joined, value = word.partition("=")
            flags[name] = (value,) if joined else ()
        elif not name:
            raise ValueError(f"training flags begin with --, got {word!r}")
        else:
            flags[name] = (*flags[name], word)
    return flags


def as_words(flags: Flags) -> tuple[str, ...]:
    """Return the command line of flags, sorted by name."""
    return tuple(word for flag in sorted(flags) for word in (flag, *flags[flag]))


def without(flags: Flags, names: Collection[str]) -> Flags:
    """Return flags without some names."""
    return {name: values for name, values in flags.items() if name not in names}


def shrink(flags: Flags, axes: Collection[Axis] | None = None) -> ShrunkRun:
    """Shrink a configuration.

    Args:
        flags: The flags of the job.
        axes: Axes to keep, of those with more than one rank; None for all that are flags. Data
            parallelism is kept if named, and otherwise only as far as weights must be sharded.
    """
    flags = without(flags, {*NOT_RUN, *_RAMPS})
    kept = axes_of(flags)
    for axis in kept:
        if axes is not None and axis not in axes:
            drop_axis(flags, axis)
    _shrink_axes(flags)
    _shrink_sizes(flags)
    world_size = _world_size(flags) if axes is None else _world_size_of(flags, axes)
    _shrink_steps(flags, world_size)
    flags |= DATA
    if "--fp16" in flags:
        # With Megatron's default loss scale, each of these few steps would overflow.
        flags[LOSS_SCALE] = ("65536",)
    return ShrunkRun(world_size, kept if axes is None else tuple(axes), flags)


def axes_of(flags: Flags) -> tuple[Axis, ...]:
    """Return the flags of axes that have more than one rank."""
    return tuple(name for name in AXES[:-1] if number(flags, name) > 1)


def ranks_of(flags: Flags) -> int:
    """Return a number of ranks that fits all axes of the job at full size."""
    tensor, pipeline, context, expert, expert_tensor = _sizes(flags)
    dense, experts = tensor * context, expert * expert_tensor
    shards = math.lcm(dense, experts if "--num-experts" in flags else 1)
    shards *= number(flags, INSTANCES) if shards == dense else 1
    micro, batch = number(flags, "--micro-batch-size"), number(flags, "--global-batch-size", 0)
    replicas = shards // dense
    doubles = batch % (2 * replicas * micro) == 0
    return pipeline * shards * (2 if doubles else 1)


def covering_runs(flags: Flags, most_ranks: int = MOST_RANKS) -> list[ShrunkRun]:
    """Shrink a configuration to runs that together hold every pair of its axes.

    Args:
        flags: The flags of the job.
        most_ranks: Largest number of ranks of a run.

    Raises:
        ValueError: A pair of axes needs more ranks.
    """
    axes = (DATA_PARALLEL, *axes_of(flags))
    runs: list[ShrunkRun] = []
    candidates = [
        run
        for size in range(len(axes), 0, -1)
        for chosen in itertools.combinations(axes, size)
        if (run := shrink(flags, chosen)).world_size <= most_ranks
    ]
    missing = [frozenset(pair) for pair in itertools.combinations(axes, 2)] or [frozenset(axes)]
    while missing:
        held = {run: sum(pair.issubset(run.axes) for pair in missing) for run in candidates}
        best = max(held, key=lambda run: held[run] / run.world_size, default=None)
        if best is None or not held[best]:
            pair = " and ".join(sorted(missing[0]))
            raise ValueError(f"{most_ranks} ranks cannot hold {pair}; allow more --local-ranks")
        runs.append(best)
        missing = [pair for pair in missing if not pair.issubset(best.axes)]
    return runs


def drop_axis(flags: Flags, axis: Axis) -> None:
    """Set the size of an axis to 1, and remove the flags that need the axis."""
    for name in _OF_AXIS.get(axis, ()):
        flags.pop(name, None)
    flags[axis] = ("1",)
    if axis == PIPELINE:
        for name in PATTERNS & flags.keys():
            flags[name] = (flags[name][0].replace("|", ""),)


def number(flags: Flags, name: str, default: int = 1) -> int:
    """Return the value of a flag."""
    return int(flags[name][0]) if name in flags else default


def _shrink_axes(flags: Flags) -> None:
    tensor, pipeline, context, expert, expert_tensor = _sizes(flags)
    fits = tensor * context == expert * expert_tensor
    if number(flags, "--num-query-groups", tensor) < tensor:
        # Fewer groups than tensor-parallel ranks: ranks share keys and values.
        flags["--num-query-groups"] = ("1",)
    for name in AXES:
        if number(flags, name) > 1:
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
        (name,) = PATTERNS & flags.keys()
        _shrink_pattern(flags, name, pipeline)
    else:
        _shrink_layers(flags)


def _shrink_layers(flags: Flags) -> None:
    """Set two layers per stage, or one per virtual stage."""
    pipeline = number(flags, "--pipeline-model-parallel-size")
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
    """Keep the first layer of each run of equal layers, and repeat the last one."""
    text = flags.get("--moe-layer-freq", ("1",))[0]
    if text.isdecimal() or not re.fullmatch(r"[\[\]()\d+*, ]+", text):
        return
    values = evaluate_pattern(text)
    if isinstance(values, int):
        raise ValueError(f"--moe-layer-freq {text} is neither a number nor a list")
    kinds = [kind for kind, _ in itertools.groupby(values)]
    kinds = [*kinds, *(kinds[-1:] * layers)][:layers]
    flags["--moe-layer-freq"] = (f"[{','.join(map(str, kinds))}]",)


def _num_stages(flags: Flags, before: int, pipeline: int) -> int:
    """Return the number of stages after shrinking."""
    now = number(flags, "--pipeline-model-parallel-size")
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
    tensor = number(flags, TENSOR)
    scale = 1 if QUANTIZED.isdisjoint(flags) else 2 * tensor
    for name, largest in SIZES.items():
        if name in flags:
            most = largest * scale if name in WIDTHS else largest
            flags[name] = (str(min(number(flags, name), most)),)
    for name, value in WITHIN_FEW_STEPS.items():
        if name in flags:
            flags[name] = (value,)
    _show_terms(flags)


def _show_terms(flags: Flags) -> None:
    """Enlarge the terms of an optimizer's step that a few steps would not show."""
    for name, (default, least) in AT_LEAST.items():
        value = float(flags[name][0]) if name in flags else default
        if 0 < value < least:
            flags[name] = (str(least),)
    clip = float(flags[CLIP_GRAD][0]) if CLIP_GRAD in flags else 1.0
    if clip > MOST_CLIP_GRAD:
        flags[CLIP_GRAD] = (str(MOST_CLIP_GRAD),)
    if set(SCHEDULED_DECAY) <= flags.keys():
        values = [float(flags[name][0]) for name in SCHEDULED_DECAY]
        scale = max(1.0, AT_LEAST[WEIGHT_DECAY][1] / max(*values, 1e-30))
        for name, value in zip(SCHEDULED_DECAY, values, strict=True):
            flags[name] = (str(value * scale),)


def _sizes(flags: Flags) -> list[int]:
    """Return the sizes of the first five axes."""
    tensor, *others = (number(flags, name) for name in AXES[:4])
    return [tensor, *others, number(flags, AXES[4], tensor)]


def _world_size(flags: Flags) -> int:
    """Return the fewest ranks that fit all axes and, if `MOST_RANKS` suffice, shard all weights."""
    tensor, pipeline, context, expert, expert_tensor = _sizes(flags)
    world_size = tensor * pipeline * max(context, 2 * number(flags, INSTANCES))
    if world_size > MOST_RANKS:
        world_size = tensor * pipeline * context
    if "--num-experts" in flags:
        world_size = max(world_size, pipeline * expert * expert_tensor)
        if 2 * expert * expert_tensor * pipeline <= MOST_RANKS:
            world_size = max(world_size, 2 * expert * expert_tensor * pipeline)
    return world_size


def _world_size_of(flags: Flags, axes: Collection[Axis]) -> int:
    """Return the fewest ranks that fit all axes and shard all weights."""
    tensor, pipeline, context, expert, expert_tensor = _sizes(flags)
    data = 2 if DATA_PARALLEL in axes else 1
    world_size = tensor * pipeline * max(context * data, 2 * number(flags, INSTANCES))
    if "--num-experts" in flags:
        world_size = max(world_size, 2 * expert * expert_tensor * pipeline)
    return world_size


def _shrink_steps(flags: Flags, world_size: int) -> None:
    """Set a few iterations of a few micro-batches."""
    tensor, pipeline, context, *_ = _sizes(flags)
    replicas = world_size // (tensor * pipeline * context)
    micro = number(flags, "--micro-batch-size") * replicas
    group = number(flags, "--microbatch-group-size-per-virtual-pipeline-stage", 0)
    batch = micro * (group or max(NUM_MICROBATCHES, pipeline))
    samples = ITERATIONS * batch
    if "--step-batch-size-schedule" in flags:
        # Thresholds are in tokens. Half of the iterations have twice the samples.
        threshold = samples // 2 * number(flags, "--seq-length")
        flags["--step-batch-size-schedule"] = (f"0:{batch} {threshold}:{2 * batch}",)
        samples += samples // 2
    else:
        flags["--global-batch-size"] = (str(batch),)
    if "--eval-global-batch-size" in flags:
        flags["--eval-global-batch-size"] = (str(batch),)
    for name in ("--lr-decay-samples", "--lr-wsd-decay-samples"):
        if name in flags:
            flags[name] = (str(2 * samples),)
    if number(flags, "--lr-warmup-samples", 0) > 0:
        flags["--lr-warmup-samples"] = (str(batch),)
    if "--train-samples" in flags:
        flags["--train-samples"] = (str(samples),)
    else:
        flags["--train-iters"] = (str(ITERATIONS),)
