"""Where tests of torch's end otherwise with ours, and why.

`differences.txt` lists tests by the reasons that are met in them; a test that fails for another
reason than those, or not for each of them, is an error.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("differences.txt")


@dataclass(frozen=True)
class Reason:
    """Why a test, or one of its cases, fails.

    Attributes:
        kind: `rejected` (an argument or method, by name), `differs` (what ours does instead),
            `internal` (the test asks for parts of FSDP2 or its messages) or `gpu`.
        error: A pattern that its traceback has.
        text: In words.
    """

    kind: str
    error: str
    text: str


_REJECTED, _DIFFERS, _INTERNAL, _GPU = (
    functools.partial(Reason, kind) for kind in ("rejected", "differs", "internal", "gpu")
)
REASONS = {
    "placement": _REJECTED(
        r"ValueError: shard_placement_fn returns",
        "`shard_placement_fn` that shards another dimension than 0",
    ),
    "reshard-to-fewer": _REJECTED(
        r"ValueError: reshard_after_forward must be True, False or None, got 2",
        "`reshard_after_forward=2` of 4 ranks",
    ),
    "conversion": _REJECTED(
        r"ValueError: the parameters of unit .* cannot become",
        "`model.to(dtype)` after sharding",
    ),
    "extensions": _REJECTED(
        r"ValueError: parameter .* which is made of other tensors or defines fsdp_pre_all_gather",
        "all-gather extensions (`fsdp_pre_all_gather`), and parameters made of other tensors",
    ),
    "not-here": _REJECTED(
        r"RuntimeError: \w+ was sharded by megatron_fsdp_v2, which has no",
        "`set_all_reduce_hook`, `set_allocate_memory_from_process_group_for_comm`, custom "
        "collectives; private methods",
    ),
    "beside-torchs": _REJECTED(
        r"RuntimeError: (DistributedDataParallel|torch\.distributed\.fsdp\.fully_shard) was called "
        r"on a module",
        "DDP, or torch's own `fully_shard`, around a sharded module",
    ),
    "uneven-tensor-parallel": _REJECTED(
        r"into unequal parts; make it a multiple of",
        "tensor parallelism that cuts a dimension into unequal parts",
    ),
    "rows": _DIFFERS(
        r"'NoneType' object has no attribute '(to_local|_local_tensor|full_tensor)'"
        r"|0 not greater than 0|values for attribute 'shape' do not match",
        "rows are cut otherwise, and a rank may hold none of a parameter: no `grad` there",
    ),
    "root-kept": _DIFFERS(
        r"in test_param_registration_after_forward[\s\S]*is not an instance of",
        "the root keeps its gathered weights until its backward, whatever is said",
    ),
    "meta": _DIFFERS(
        r"device\(type='cpu'\) != device\(type='meta'\)",
        "parameters on the meta device get memory, and values, in `fully_shard`",
    ),
    "replicas": _INTERNAL(
        r"in test_hsdp_broadcast_across_replicas",
        "threads that share one stream of random numbers; here ranks are processes",
    ),
    "accepted": _DIFFERS(
        r"AssertionError: (NotImplementedError|RuntimeError|AssertionError) not raised",
        "taken where FSDP2 rejects: parameters that are not contiguous, a 2-D mesh without names, "
        "modules on the meta device that can initialize themselves, a state dict on another device",
    ),
    "threads": _INTERNAL(
        r"(?!)",
        "collectives and parameter groups of FSDP2 themselves, in 128 threads, without "
        "`fully_shard`: not run",
    ),
    "state": _INTERNAL(
        r"'function' object has no attribute 'state'",
        "FSDP2's own state of a module",
    ),
    "message": _INTERNAL(
        r"\" does not match \"|cannot be deep-copied|fully_shard was already called on",
        "the same error, in other words or of another class",
    ),
    "node-count": _INTERNAL(
        r"in _test_train_mixed_requires_grad[\s\S]*False is not true",
        "calls of FSDP2's autograd function are counted, after losses and weights were compared",
    ),
    "collectives": _INTERNAL(
        r"in \w*(gradient_accumulation|train_parity_single_group|communication_count"
        r"|manual_reshard)[\s\S]*Scalars are not equal"
        r"|length of the sequences mismatch: 0 != |'mesh_info'",
        "calls of certain collectives, or of FSDP2's methods, are counted; with gloo a reduction "
        "is an all-to-all here and a large gather a broadcast by every rank, one rank alone makes "
        "none, and ranks compare notes once",
    ),
    "gpu": _GPU(
        r"module 'torch\.cpu' has no attribute|Cannot re-initialize CUDA|not compiled with CUDA"
        r"|argument 'index' \(position 2\) must be int|Expects cpu:0 but got cpu"
        r"|expected scalar type (BFloat16|Half) but found Float|ValueError not raised"
        r"|Mesh should not be bigger than default world size|SkipTest: "
        r"|Event\(\) takes no arguments",
        "torch's own fails, or skips it, on a CPU or on 4 ranks as well",
    ),
    "gloo": _GPU(
        r"in _test_clip_grad_norm[\s\S]*Tensor-likes are not close",
        "gloo's order of a sum misses the tolerance, with torch's own as well",
    ),
    "half-sums": _DIFFERS(
        r"in _test_(compute_dtype|reduce_dtype_bf16_reduce)[\s\S]*Tensor-likes are not close",
        "on a CPU gradients that travel in bf16 or fp16 are added up in fp32, and not rounded "
        "after each term",
    ),
}


def expected() -> dict[str, frozenset[str]]:
    """Reasons that are met in each test that does not pass, by its name."""
    found: dict[str, frozenset[str]] = {}
    for line in FILE.read_text().splitlines():
        if line and not line.startswith("#"):
            name, *reasons = line.split()
            found[name] = frozenset(reasons)
    return found


def column_of(reasons: Collection[str]) -> str:
    """Where a test that does not pass is counted: what a user would notice comes first."""
    kinds = {REASONS[reason].kind for reason in reasons}
    if kinds & {"differs", "rejected"}:
        return "differ, or rejected"
    return "internal" if "internal" in kinds else "need GPUs"


def reason_of(error: str) -> str | None:
    """The reason that a traceback shows; None where it is none of those that are known."""
    for name, reason in REASONS.items():
        if re.search(reason.error, error):
            return name
    return None
