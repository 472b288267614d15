"""Settings of a run, and their conversion to Megatron's flags."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from examples.pretrain_text.dataset import VOCAB_SIZE, Dataset

# Value of `--strategy` for the same run with Megatron's own data parallelism, for comparison.
DDP = "ddp"

# A byte-level GPT of about 1.3 million parameters: on two cores a step takes part of a second.
NUM_LAYERS = 6
HIDDEN_SIZE = 128
NUM_HEADS = 4
SEQ_LENGTH = 256
GLOBAL_BATCH_SIZE = 12
LEARNING_RATE = 2e-3

# Minimum number of resumed iterations to compare.
NUM_RESUMED_ITERS = 20
MIN_ITERS = 8


@dataclass(frozen=True)
class Settings:
    """Settings of one pretraining run.

    Attributes:
        strategy: A value of `--data-parallel-sharding-strategy`, or `DDP`.
        ranks: Number of ranks.
        iters: Iterations of the first run.
        out: Output folder.
        on_cpu: Whether this is a CPU rehearsal.
    """

    strategy: str
    ranks: int
    iters: int
    out: Path
    on_cpu: bool

    def __post_init__(self) -> None:
        """Validates the settings before Megatron starts.

        Raises:
            ValueError: A setting is invalid.
        """
        if self.ranks < 1:
            raise ValueError(f"RANKS={self.ranks}, but at least 1 rank is needed.")
        if GLOBAL_BATCH_SIZE % self.ranks:
            raise ValueError(
                f"RANKS={self.ranks} does not divide the batch of {GLOBAL_BATCH_SIZE} sequences: "
                "use 1, 2, 3, 4, 6 or 12 ranks."
            )
        if self.iters < MIN_ITERS:
            raise ValueError(f"ITERS={self.iters}, but at least {MIN_ITERS} are needed.")

    @property
    def half_way(self) -> int:
        """The iteration after which the checkpoint to resume from is saved."""
        return (self.iters + 1) // 2

    @property
    def resumed_until(self) -> int:
        """The last iteration of the resumed run."""
        return min(self.iters, self.half_way + NUM_RESUMED_ITERS)

    @property
    def checkpoints(self) -> Path:
        """The folder for Megatron's checkpoints."""
        return self.out / "checkpoints"

    @property
    def first_log(self) -> Path:
        """The command and the output of the first run."""
        return self.out / "first_run.log"

    @property
    def half_way_checkpoint(self) -> Path:
        """The checkpoint that the second run resumes from."""
        return self.checkpoints / f"iter_{self.half_way:07d}"

    @property
    def tokens_per_iteration(self) -> int:
        """Tokens that one iteration trains on, over all ranks."""
        return GLOBAL_BATCH_SIZE * SEQ_LENGTH


def first_run_flags(settings: Settings, dataset: Dataset) -> list[str]:
    """Flags of the first run: all iterations, with a checkpoint half-way.

    Args:
        settings: The run.
        dataset: The dataset to train on.

    Returns:
        The flags for `pretrain_gpt`.
    """
    return [
        *_common_flags(settings, dataset),
        *("--save", str(settings.checkpoints), "--save-interval", str(settings.half_way)),
    ]


def second_run_flags(settings: Settings, dataset: Dataset) -> list[str]:
    """Flags of the second run, which resumes from the checkpoint half-way.

    Args:
        settings: The run.
        dataset: The dataset to train on.

    Returns:
        The flags for `pretrain_gpt`. The schedule is that of the first run; the run stops earlier.
    """
    return [
        *_common_flags(settings, dataset),
        *("--load", str(settings.checkpoints), "--ckpt-step", str(settings.half_way)),
        *("--exit-interval", str(settings.resumed_until)),
    ]


def _common_flags(settings: Settings, dataset: Dataset) -> list[str]:
    """Flags of both runs."""
    return [
        *_model_flags(),
        *_data_flags(dataset),
        *_schedule_flags(settings),
        *_sharding_flags(settings.strategy),
        *_device_flags(settings.on_cpu),
    ]


def _model_flags() -> list[str]:
    return [
        *("--num-layers", str(NUM_LAYERS), "--hidden-size", str(HIDDEN_SIZE)),
        *("--num-attention-heads", str(NUM_HEADS), "--seq-length", str(SEQ_LENGTH)),
        *("--max-position-embeddings", str(SEQ_LENGTH), "--position-embedding-type", "rope"),
        *("--attention-dropout", "0", "--hidden-dropout", "0", "--init-method-std", "0.02"),
        *("--untie-embeddings-and-output-weights", "--bf16"),
    ]


def _data_flags(dataset: Dataset) -> list[str]:
    return [
        *("--data-path", str(dataset.prefix), "--data-cache-path", str(dataset.index_cache)),
        *("--split", "98,1,1", "--tokenizer-type", "NullTokenizer"),
        *("--vocab-size", str(VOCAB_SIZE)),
    ]


def _schedule_flags(settings: Settings) -> list[str]:
    micro_batch_size = GLOBAL_BATCH_SIZE // settings.ranks
    return [
        *("--train-iters", str(settings.iters), "--global-batch-size", str(GLOBAL_BATCH_SIZE)),
        *("--micro-batch-size", str(micro_batch_size), "--seed", "1234"),
        *("--optimizer", "adam", "--adam-beta2", "0.95", "--weight-decay", "0.1"),
        *("--clip-grad", "1.0", "--lr", str(LEARNING_RATE), "--min-lr", str(LEARNING_RATE / 10)),
        *("--lr-decay-style", "cosine", "--lr-warmup-fraction", "0.1"),
        *("--eval-interval", str(settings.iters), "--eval-iters", "4", "--log-interval", "1"),
    ]


def _sharding_flags(strategy: str) -> list[str]:
    if strategy == DDP:
        return ["--ckpt-format", "torch_dist"]
    return [
        *("--use-megatron-fsdp", "--use-fsdp-fully-shard-api"),
        *("--data-parallel-sharding-strategy", strategy, "--ckpt-format", "fsdp_dtensor"),
    ]


def _device_flags(on_cpu: bool) -> list[str]:
    if on_cpu:
        # Megatron's own layers: on a CPU they start and run faster than Transformer Engine's.
        return ["--cpu-rehearsal", "--transformer-impl", "local"]
    if importlib.util.find_spec("transformer_engine"):
        return []
    # Megatron's default layers are Transformer Engine's; its own layers need no fused kernels.
    return [
        *("--transformer-impl", "local", "--attention-backend", "unfused"),
        *("--no-persist-layer-norm", "--no-gradient-accumulation-fusion"),
        *("--no-masked-softmax-fusion", "--no-rope-fusion"),
    ]
