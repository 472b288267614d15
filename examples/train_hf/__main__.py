"""The command line of the trainer."""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from transformers.utils import logging

from examples.train_hf.loop import train
from examples.train_hf.setup import COMPUTE_DTYPES, SMALL_MODELS
from megatron_fsdp_v2.layout.placement import STRATEGIES


def build_parser() -> argparse.ArgumentParser:
    """Builds the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.train_hf",
        description="Train a Hugging Face causal language model on all ranks of torchrun.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--parallel-strategy", choices=("ddp", "fsdp"), default="fsdp", help="torch's DDP, or ours")
    add("--sharding-strategy", choices=STRATEGIES, help="of fsdp; None: optim_grads_params")
    add("--mesh", help="replicas x ranks of a shard, such as 2x4 (HSDP)")
    small = ", ".join(SMALL_MODELS)
    add("--model", default="llama", help=f"a model's folder or config.json, or small: {small}")
    add("--tokenizer", type=Path, help="folder of a tokenizer; None: bytes")
    add("--text", help="file or folder of text; None: the Python library")
    add("--optimizer", choices=("adamw", "muon"), default="adamw", help="muon: layers' matrices")
    add("--lr", type=float, help="peak learning rate; None: 0.001, or 0.02 of Muon's matrices")
    add("--dtype", choices=COMPUTE_DTYPES, default="bf16", help="of compute; weights are fp32")
    add("--steps", type=int, default=100, help="optimizer steps, those before --resume included")
    add("--batch-size", type=int, default=12, help="sequences of a step, over all ranks")
    add("--micro-batch-size", type=int, help="sequences of a backward on a rank; None: all of them")
    add("--seq-length", type=int, default=256, help="tokens of a sequence")
    add("--compile", nargs="?", const="inductor", metavar="BACKEND", help="compile each layer")
    add("--gradient-checkpointing", action="store_true", help="recompute layers in the backward")
    add("--eval-every", type=int, default=50, help="steps between evaluations")
    add("--save-every", type=int, help="steps between checkpoints; None: one at the end")
    add("--resume", type=Path, help="a checkpoint of any strategy and number of ranks")
    add("--out", type=Path, default=Path("out/train_hf"), help="checkpoints, log.jsonl, loss.png")
    add("--export", type=Path, help="a new folder for from_pretrained, written at the end")
    add("--seed", type=int, default=1234, help="of initial weights and the order of sequences")
    return parser


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """Joins the ranks that torchrun started; without torchrun, a group of one rank."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.destroy_process_group()


def main(words: Sequence[str] | None = None) -> int:
    """Trains; returns the exit code."""
    settings = build_parser().parse_args(words)
    # Bars and warnings of every rank would hide the line of an error.
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with process_group():
        try:
            train(settings)
        except (ValueError, OSError) as error:
            # Messages of libraries may have several lines.
            message = " ".join(str(error).split())
            sys.stderr.write(f"train_hf: rank {dist.get_rank()}: {message}\n")
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
