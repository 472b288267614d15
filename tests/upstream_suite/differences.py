"""Tests of upstream with another result under this package, and the reasons (`differences.txt`)."""

from __future__ import annotations

from pathlib import Path

from tests.fsdp2_suite.differences import Reason

FILE = Path(__file__).with_name("differences.txt")

REASONS = {
    "skipped": Reason("skipped", r"SkipTest: ", "upstream skips the test or expects it to fail"),
    "gpu": Reason(
        "gpu",
        r"(?!)",
        "the test counts kernels of NCCL: not run",
    ),
    "context": Reason(
        "internal",
        r"has no attribute 'context'|IndexError: list index out of range",
        "the test reads the object in which upstream's `fully_shard_context` collects modules; "
        "here `fully_shard` needs no context",
    ),
    "buffers": Reason(
        "internal",
        r"has no attribute '_unsharded_model_weight'|unhashable type: 'types.SimpleNamespace'"
        r"|in test_(persistent_sharded_storage|zero1_memory_)[\s\S]*assert (False|\(<Placement)",
        "the test replaces methods of upstream's parameter groups, or reads their buffers",
    ),
    "v1-buffers": Reason(
        "internal",
        r"'MegatronFSDP' object has no attribute 'param_and_grad_buffer'",
        "the test reads v1's buffers",
    ),
    "early": Reason(
        "differs",
        r"Root module gradients should not exist prior to optimization step",
        "ZeRO-2 and ZeRO-3 set `param.grad` in every backward, to the sum so far; v1 sets it when "
        "gradients are synchronized",
    ),
    "graph": Reason(
        "differs",
        r"ValueError: cuda_graph_mode is not supported",
        "`cuda_graph_mode=True` is rejected; docs/gpu.md describes the capture of a step",
    ),
    "stream": Reason(
        "internal",
        r"NotImplementedError: shim: \{'unify_communication_stream': True\}",
        "the test uses an option of upstream's context, one stream for all communication",
    ),
    "gradients-at-rest": Reason(
        "differs",
        r"AssertionError: (FSDP persistent memory|FSDP training-step peak|Fully-sharded storage)",
        "the test counts main gradients, and a second bf16 weight beside fp32 main weights, as "
        "memory between steps; here gradients have memory while `param.grad` does, and ZeRO-3 "
        "keeps no second weight",
    ),
    "accepted": Reason(
        "differs",
        r"DID NOT RAISE",
        "supported here, but rejected by upstream: `load_state_dict(assign=True)` after sharding, "
        "Adam on a model with bf16 weights without `fully_shard_optimizer`, a forward between two "
        "calls of `fully_shard`, units that are sharded in several steps",
    ),
}


def expected() -> dict[str, str]:
    """Return the reason of each test that does not pass, by the test's name."""
    lines = (line for line in FILE.read_text().splitlines() if not line.startswith("#"))
    return {name: reason for name, _, reason in (line.rpartition(" ") for line in lines)}


def column_of(reason: str) -> str:
    """Return the page's column of a test that does not pass."""
    return {"differs": "differ", "gpu": "need GPUs"}.get(REASONS[reason].kind, REASONS[reason].kind)
