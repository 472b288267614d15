"""Small recipes of Megatron-Bridge, which train on the ranks of a pool in a CPU rehearsal."""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import json
import multiprocessing
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

import megatron_fsdp_v2_for.bridge
from tests.clients.stubs import stub
from tests.mcore.session import start_permanent_rehearsal

LENGTH = 16
VOCABULARY = 128
_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": LENGTH,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "head_dim": 8,
}

# -- packages that Megatron-Bridge imports and that no training on a CPU calls ---------------------

# transformers 5.24 does not have the last one.
_STUBBED = (
    "diffusers",
    "hydra",
    "megatron.energon",
    "modelopt",
    "transformers.modeling_attn_mask_utils",
)
_STUBBED_ALONE = ("nvidia_resiliency_ext", "nvidia_resiliency_ext.inprocess")
"""Modules without their other submodules, which Megatron uses if they exist."""


def start() -> None:
    """Start a permanent rehearsal in this process and those forked from it."""
    start_permanent_rehearsal("transformer_engine")
    stub(_STUBBED, _STUBBED_ALONE)
    importlib.import_module("megatron.bridge.training.pretrain")
    importlib.import_module("megatron.bridge.training.gpt_step")


# -- recipes ---------------------------------------------------------------------------------------


def save_model(folder: str, kind: str, seed: int = 1) -> None:
    """Save a model of Hugging Face with random weights: `dense`, `tied` or `experts`.

    The weights are exact in bf16: in recipes with bf16, main weights of Megatron's DDP start from
    rounded weights.
    """
    torch.manual_seed(seed)
    if kind == "experts":
        config: Any = transformers.Qwen3MoeConfig(**_SIZES, **_EXPERTS)
    else:
        config = transformers.LlamaConfig(**_SIZES, tie_word_embeddings=kind == "tied")
    model = transformers.AutoModelForCausalLM.from_config(config)
    for param in model.parameters():
        param.data = param.data.bfloat16().float()
    model.save_pretrained(folder)


def save_prompts(folder: str) -> None:
    """Save prompts and answers of different lengths, and a tokenizer of their words."""
    words = {"<end>": 0, "<unknown>": 1, **{str(n): n for n in range(2, VOCABULARY)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", unk_token="<unknown>"
    ).save_pretrained(folder)
    draw = random.Random(1)

    def text(longest: int) -> str:
        return " ".join(str(draw.randrange(2, VOCABULARY)) for _ in range(draw.randint(1, longest)))

    lines = [json.dumps({"input": text(6), "output": text(5)}) for _ in range(64)]
    Path(folder, "training.jsonl").write_text("\n".join(lines))


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        folder: Folder of the model of Hugging Face with the initial weights.
        strategy: Argument of `install()`, which is not called if empty.
        is_sharded: Whether the recipe sets `use_megatron_fsdp`; otherwise Megatron's DDP trains.
        iterations: Number of iterations after which the training ends.
        save: Folder to save to.
        load: Folder to load from.
        pretrained: Folder of the initial weights if it is not `folder`.
        model: Changed fields of the model's configuration.
        config: Other changed fields, such as `ddp.average_in_collective`.
        precision: Name of a recipe of Megatron-Bridge for bf16 and FP8; fp32 if empty.
        adapters: Arguments of `create_peft` for adapters that are trained, such as `type`; all
            weights are trained if empty.
        sft: Folder of `save_prompts`; the data are random tokens if empty.
        is_packed: Whether prompts and answers are packed into sequences.
    """

    folder: str
    strategy: str = ""
    is_sharded: bool = True
    iterations: int = 4
    save: str = ""
    load: str = ""
    pretrained: str = ""
    model: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    precision: str = ""
    adapters: dict[str, Any] = field(default_factory=dict)
    sft: str = ""
    is_packed: bool = False

    @property
    def plain(self) -> Run:
        """The whole training with Megatron's DDP."""
        return Run(
            self.folder,
            is_sharded=False,
            model=self.model,
            config=self.config,
            precision=self.precision,
            adapters=self.adapters,
            sft=self.sft,
            is_packed=self.is_packed,
        )


def recipe(run: Run) -> Any:
    """Return the configuration of a training."""
    from megatron.bridge import AutoBridge
    from megatron.bridge.peft.utils import create_peft
    from megatron.bridge.training import config
    from megatron.bridge.training.mixed_precision import get_mixed_precision_config

    model = AutoBridge.from_hf_pretrained(run.folder).to_megatron_provider(load_weights=False)
    on_cpu = {
        "apply_rope_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "moe_permute_fusion": False,
        "cross_entropy_loss_fusion": False,
    }
    precision = {"bf16": False, "params_dtype": torch.float32, "autocast_dtype": torch.float32}
    for name, value in {**on_cpu, **precision, "seq_length": LENGTH, **run.model}.items():
        assert hasattr(model, name), name
        setattr(model, name, value)
    result = config.ConfigContainer(
        model=model,
        peft=create_peft(run.adapters) if run.adapters else None,
        train=config.TrainingConfig(
            train_iters=run.iterations, global_batch_size=8, micro_batch_size=1
        ),
        validation=config.ValidationConfig(eval_iters=0),
        optimizer=config.OptimizerConfig(
            optimizer="adam", lr=1e-2, min_lr=1e-3, adam_eps=1e-3, use_distributed_optimizer=True
        ),
        scheduler=config.SchedulerConfig(
            max_steps=4, lr_warmup_iters=2, start_weight_decay=0.1, end_weight_decay=0.1
        ),
        ddp=config.DistributedDataParallelConfig(
            use_megatron_fsdp=run.is_sharded,
            use_distributed_optimizer=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            grad_reduce_in_fp32=True,
            check_for_nan_in_grad=True,
        ),
        dataset=config.MockGPTDatasetConfig(
            seq_length=LENGTH,
            random_seed=1,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            dataloader_type="single",
            num_workers=0,
            num_dataset_builder_threads=1,
            split="1,0,0",
        ),
        logger=config.LoggerConfig(log_interval=1, log_params_norm=True),
        tokenizer=config.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCABULARY - 1),
        checkpoint=config.CheckpointConfig(
            ckpt_format="fsdp_dtensor" if run.is_sharded else "torch_dist",
            pretrained_checkpoint=run.pretrained or run.folder,
            save=run.save or None,
            load=run.load or None,
        ),
        dist=config.DistributedInitConfig(distributed_backend="gloo"),
    )
    if run.precision:
        result.mixed_precision = get_mixed_precision_config(run.precision)
        # Otherwise main weights of Megatron's DDP start from weights rounded to FP8.
        result.mixed_precision.fp8_param_gather = False
        result.mixed_precision.first_last_layers_bf16 = False
    for path, value in run.config.items():
        section, _, name = path.partition(".")
        assert hasattr(getattr(result, section), name), path
        setattr(getattr(result, section), name, value)
    if run.sft:
        _select_prompts(result, run)
    return result


def _select_prompts(config: Any, run: Run) -> None:
    """Select the dataset of `save_prompts`, with the loss averaged over tokens."""
    from megatron.bridge.data.builders.gpt_sft import GPTSFTDatasetConfig
    from megatron.bridge.data.packing.config import PackedSequenceSpecs

    packing = PackedSequenceSpecs(packed_sequence_size=LENGTH) if run.is_packed else None
    config.dataset = GPTSFTDatasetConfig(
        seq_length=LENGTH,
        dataset_root=run.sft,
        enable_offline_packing=run.is_packed,
        offline_packing_specs=packing,
        do_validation=False,
        do_test=False,
        num_workers=0,
    )
    config.tokenizer.tokenizer_type = "HuggingFaceTokenizer"
    config.tokenizer.tokenizer_model = run.sft
    config.tokenizer.vocab_size = None
    config.model.calculate_per_token_loss = True
    config.ddp.average_in_collective = False


def exported(folder: str, model: Any) -> dict[str, torch.Tensor]:
    """Return the weights of a model, and of its adapters, under their names in Hugging Face.

    Collective.
    """
    from megatron.bridge import AutoBridge

    hf = AutoBridge.from_hf_pretrained(folder)
    weights = hf.export_hf_weights(model, cpu=True, show_progress=False)
    adapters = hf.export_adapter_weights(model, cpu=True, show_progress=False)
    return {name: weight.detach().clone() for name, weight in itertools.chain(weights, adapters)}


def train(
    run: Run, probe: Callable[[str, Any], dict[str, torch.Tensor]] = exported
) -> dict[str, Any]:
    """Run `pretrain` on this rank. Collective.

    Args:
        run: The training.
        probe: Called at its end with `(run.folder, model)`.

    Returns:
        Losses, norms, and the result of the probe as `parameters`.
    """
    from megatron.bridge.training.callbacks import Callback
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    losses: list[torch.Tensor] = []
    norms: list[torch.Tensor] = []
    probed: dict[str, torch.Tensor] = {}

    class Watch(Callback):
        def on_train_step_end(self, context: Any) -> None:
            # Only the last pipeline stage has losses.
            loss = context.loss_dict.get("lm loss", torch.ones(()))
            losses.append(loss.detach().clone())
            norms.append(torch.tensor(context.grad_norm))

        def on_train_end(self, context: Any) -> None:
            probed.update(probe(run.folder, context.model))

    ends = [SystemExit] if "train.exit_interval" in run.config else []
    with _clean(run.strategy), contextlib.suppress(*ends):
        pretrain(recipe(run), forward_step, callbacks=[Watch()])
    return {"losses": torch.stack(losses), "norms": torch.stack(norms), "parameters": probed}


@contextlib.contextmanager
def _clean(strategy: str) -> Iterator[None]:
    """Install this package if a strategy is given, and reset Megatron's state at the end."""
    from megatron.core import parallel_state

    from megatron_fsdp_v2_mcore.prove.session import end_groups

    # Megatron's torch_dist checkpoints start processes, which a daemon must not do.
    multiprocessing.current_process().daemon = False
    torch.manual_seed(1)
    if strategy:
        megatron_fsdp_v2_for.bridge.install(sharding_strategy=strategy)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        megatron_fsdp_v2_for.bridge.uninstall()
        end_groups(parallel_state)
