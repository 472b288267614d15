"""What a training starts from: packed text, the parallel model, and its optimizer."""

import argparse
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from examples.pretrain_text.text import collect
from megatron_fsdp_v2 import MixedPrecisionPolicy, fully_shard
from megatron_fsdp_v2.optim import Muon

_SMALL = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
SMALL_MODELS: dict[str, dict[str, Any]] = {
    "llama": _SMALL,
    "qwen3": _SMALL,
    "qwen3_moe": _SMALL | _EXPERTS,
    "gemma3_text": _SMALL,
    "gpt2": {
        "n_embd": 128,
        "n_layer": 4,
        "n_head": 4,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
    },
}
"""Options of small models to try the trainer with, by model type of transformers."""

COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def say(text: str) -> None:
    """Prints a line on the first rank, above the progress bar."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        tqdm.write(text)


# -- text -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    """Documents, packed into sequences of equal length.

    Attributes:
        tokenizer: What made the tokens.
        trained: Sequences to train on, (number, seq_length).
        held_out: Sequences to evaluate on, (number, seq_length).
        seed: Seed of the order of sequences.
    """

    tokenizer: PreTrainedTokenizerBase
    trained: torch.Tensor
    held_out: torch.Tensor
    seed: int

    def batch(self, step: int, size: int) -> torch.Tensor:
        """Returns the sequences of a step, (size, seq_length), for any number of ranks."""
        total = len(self.trained)
        numbers = range(step * size, (step + 1) * size)
        orders = {
            epoch: torch.randperm(total, generator=torch.Generator().manual_seed(self.seed + epoch))
            for epoch in {number // total for number in numbers}
        }
        return torch.stack([self.trained[orders[n // total][n % total]] for n in numbers])


def load_text(settings: argparse.Namespace) -> Text:
    """Tokenizes and packs the text.

    Raises:
        ValueError: There is too little text, or no tokenizer.
    """
    if settings.tokenizer is None:
        tokenizer = _bytes_tokenizer()
    else:
        try:
            tokenizer = AutoTokenizer.from_pretrained(settings.tokenizer, local_files_only=True)
        except Exception as error:
            problem = _first_line(error)
            raise ValueError(f"--tokenizer {settings.tokenizer}: {problem}") from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"--tokenizer {settings.tokenizer} has no end-of-text token (eos_token)")
    corpus = collect(settings.text, called="--text ")
    documents = [document.decode(errors="replace") for document in corpus.documents]
    ids = [
        token
        for tokens in tokenizer(documents)["input_ids"]
        for token in (*tokens, tokenizer.eos_token_id)
    ]
    length, size = settings.seq_length, settings.batch_size
    rows = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)
    num_held_out = size * max(1, min(4, len(rows) // (20 * size)))
    if len(rows) < 2 * num_held_out:
        raise ValueError(
            f"{corpus.source}: {len(rows)} sequences of {length} tokens are too few to train on "
            f"and to evaluate with --batch-size {size}: give more --text, or a smaller "
            "--batch-size or --seq-length"
        )
    return Text(tokenizer, rows[:-num_held_out], rows[-num_held_out:], settings.seed)


def _bytes_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    end = "<|endoftext|>"
    vocabulary = {token: index for index, token in enumerate([*alphabet, end])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end)


# -- model ----------------------------------------------------------------------------------------


def build_model(settings: argparse.Namespace, vocab_size: int) -> Any:
    """Builds the model in fp32, with equal values on every rank.

    Raises:
        ValueError: There is no such model, it has no causal language head or too few positions, or
            its weights cannot be loaded.
    """
    torch.manual_seed(settings.seed)
    path = Path(settings.model)
    if settings.model in SMALL_MODELS:
        config = AutoConfig.for_model(
            settings.model,
            vocab_size=vocab_size,
            max_position_embeddings=settings.seq_length + 64,
            bos_token_id=None,
            eos_token_id=vocab_size - 1,
            pad_token_id=None,
            **SMALL_MODELS[settings.model],
        )
    elif path.exists():
        config = _read_config(path)
        if config.vocab_size < vocab_size:
            raise ValueError(
                f"--model {path} has {config.vocab_size} tokens, and the tokenizer {vocab_size}: "
                "give --tokenizer of the model"
            )
        positions = num_positions(config)
        if positions is not None and positions < settings.seq_length:
            raise ValueError(
                f"--seq-length {settings.seq_length} is too long: --model {path} has {positions} "
                "positions"
            )
        if _has_weights(path):
            return _load_model(path)
    else:
        raise ValueError(
            f"--model {settings.model} is neither a model's folder or config.json nor one of "
            f"{', '.join(SMALL_MODELS)}"
        )
    say(f"--model {settings.model}: starts from random weights")
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def num_positions(config: Any) -> int | None:
    """Returns the longest sequence of a model; None if its configuration has no limit."""
    found = getattr(config, "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def _read_config(path: Path) -> Any:
    """Reads a model's configuration.

    Raises:
        ValueError: It cannot be read, or is not of a causal language model.
    """
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:
        raise ValueError(f"--model {path}: {_first_line(error)}") from error
    kind = f"--model {path} is of type {config.model_type}"
    if type(config).sub_configs:
        parts = ", ".join(type(config).sub_configs)
        raise ValueError(f"{kind}, composed of {parts}: give a model of text alone")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or not hasattr(config, "vocab_size"):
        raise ValueError(f"{kind}, for which transformers has no causal language head")
    return config


_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack", "*.distcp")


def _has_weights(path: Path) -> bool:
    """Whether a folder has weights that transformers loads; False without any.

    Raises:
        ValueError: It has weights of another kind, which must not be left out in silence.
    """
    if any(file for pattern in _WEIGHTS for file in path.glob(pattern)):
        return True
    other = [file.name for pattern in _OTHER_WEIGHTS for file in path.glob(pattern)]
    if other:
        raise ValueError(
            f"--model {path} has weights that from_pretrained does not load ({other[0]}); convert "
            "them to model.safetensors with megatron-fsdp-v2 ckpt convert"
        )
    return False


def _load_model(path: Path) -> Any:
    """Loads a model with all of its weights.

    Raises:
        ValueError: A file is damaged, or weights are missing.
    """
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    # Libraries for files raise errors of their own, without the file's name.
    except Exception as error:
        where = next(_damaged_files(path), None)
        if where is not None:
            raise ValueError(f"--model: {where} is damaged or cut short") from error
        raise ValueError(f"--model {path} cannot be loaded: {_first_line(error)}") from error
    if missing := sorted(info["missing_keys"]):
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise ValueError(
            f"--model {path} has no weights for {missing[0]}{more} of {type(model).__name__}: it "
            "is not a causal language model, or incomplete"
        )
    return model


def _damaged_files(path: Path) -> Iterator[Path]:
    for file in sorted(path.glob("*.safetensors")):
        try:
            with safe_open(file, "pt"):
                pass
        except (SafetensorError, OSError):
            yield file
    yield from (file for file in sorted(path.glob("*.bin")) if not zipfile.is_zipfile(file))


def _first_line(error: Exception) -> str:
    """Returns the first line of an error's message; those of transformers have many."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Returns the decoder's layers: the outermost list with the most parameters.

    Raises:
        ValueError: The model has no list of layers.
    """
    lists = [*_outer_lists(model)]
    if not lists:
        raise ValueError(f"{type(model).__name__} has no list of layers (nn.ModuleList)")
    return max(lists, key=lambda found: sum(param.numel() for param in found.parameters()))


def _outer_lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from _outer_lists(child)


def parallelize(model: Any, settings: argparse.Namespace, device: torch.device) -> nn.Module:
    """Makes a model data-parallel; returns the module to call. The one place of the switch.

    Raises:
        ValueError: The mesh does not fit the number of ranks.
    """
    model.to(device)
    if settings.gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    layers = decoder_layers(model)
    trained: nn.Module = model
    if settings.parallel_strategy == "ddp":
        trained = DistributedDataParallel(model)
    else:
        options: dict[str, Any] = {
            "mesh": _mesh(settings.mesh, device.type),
            "sharding_strategy": settings.sharding_strategy or "optim_grads_params",
            # Main weights stay fp32, as they are.
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=None if settings.dtype == "fp32" else COMPUTE_DTYPES[settings.dtype],
                grad_comm_dtype=torch.float32,
            ),
        }
        for unit in (*layers, model.get_input_embeddings(), model.get_output_embeddings(), model):
            fully_shard(unit, **options)
    if settings.compile:
        for layer in layers:
            layer.compile(backend=settings.compile)
    return trained


def _mesh(shape: str | None, device_type: str) -> DeviceMesh:
    num_ranks = dist.get_world_size()
    if shape is None:
        return init_device_mesh(device_type, (num_ranks,))
    sizes = tuple(int(size) if size.isdecimal() else 0 for size in shape.split("x"))
    if len(sizes) != 2 or sizes[0] * sizes[1] != num_ranks:
        raise ValueError(f"--mesh {shape} must be RxS, such as 2x4, with R * S = {num_ranks} ranks")
    return init_device_mesh(device_type, sizes)


def build_optimizer(model: nn.Module, settings: argparse.Namespace) -> torch.optim.Optimizer:
    """Builds the optimizer; it does not matter to it how parameters are sharded, or if."""
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=settings.lr or 1e-3, weight_decay=0.1)
    matrices = [param for param in decoder_layers(model).parameters() if param.ndim in (2, 3)]
    known = {id(param) for param in matrices}
    others = [param for param in model.parameters() if id(param) not in known]
    groups: list[dict[str, Any]] = [{"params": matrices}]
    groups.append({"params": others, "use_muon": False, "lr": 1e-3})
    dtype = torch.bfloat16 if settings.dtype == "bf16" else torch.float32
    return Muon(groups, lr=settings.lr or 0.02, ns_dtype=dtype)
