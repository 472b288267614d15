"""Tests of FSDP2 with another result under this package's `fully_shard`, and the reasons.

`differences.txt` lists the reasons for which each test fails. A test that fails for another reason,
or no longer fails for a listed reason, is an error.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("differences.txt")


@dataclass(frozen=True)
class Reason:
    """Why a test, or one of its cases, fails.

    Attributes:
        kind: `rejected` (an argument or method, by name), `differs` (another behavior),
            `internal` (the test checks internals of FSDP2 or its messages) or `gpu`.
        error: A pattern that matches the traceback.
        text: The reason, for the page.
    """

    kind: str
    error: str
    text: str


_REJECTED, _DIFFERS, _INTERNAL, _GPU = (
    functools.partial(Reason, kind) for kind in ("rejected", "differs", "internal", "gpu")
)
REASONS = {
    "placement": _DIFFERS(
        r"ValueError: shard_placement_fn returns"
        r"|in test_init_(1d_transformer_shard_largest|2d_transformer_shard_diff)_dim",
        "`Shard` of another dimension than 0 from `shard_placement_fn`: parameters are sharded by "
        "rows, equally over all ranks, or an error says that they cannot be",
    ),
    "reshard-to-fewer": _REJECTED(
        r"ValueError: reshard_after_forward must be True, False or None, got 2",
        "`reshard_after_forward=2` of 4 ranks",
    ),
    "conversion": _REJECTED(
        r"ValueError: the parameters of unit .* cannot become", "`model.to(dtype)` after sharding"
    ),
    "extensions": _REJECTED(
        r"ValueError: parameter .* its fsdp_pre_all_gather cannot be called"
        r"|ValueError: parameter .* which is made of other tensors",
        "parameters made of several tensors, also with all-gather extensions "
        "(`fsdp_pre_all_gather`)",
    ),
    "not-here": _REJECTED(
        r"RuntimeError: \w+ was sharded by megatron_fsdp_v2, which has no",
        "`set_allocate_memory_from_process_group_for_comm`, custom collectives; private methods",
    ),
    "uneven-tensor-parallel": _REJECTED(
        r"into unequal parts; make it a multiple of",
        "tensor parallelism that splits a dimension into unequal shards",
    ),
    "rows": _DIFFERS(
        r"'NoneType' object has no attribute '(to_local|_local_tensor|full_tensor)'"
        r"|0 not greater than 0|values for attribute 'shape' do not match",
        "rows are distributed differently: a rank may have no rows of a parameter, and then `grad` "
        "is None",
    ),
    "root-kept": _DIFFERS(
        r"in test_param_registration_after_forward[\s\S]*is not an instance of",
        "the root always keeps its gathered weights until its backward, also with "
        "`reshard_after_forward=True`",
    ),
    "meta": _DIFFERS(
        r"device\(type='cpu'\) != device\(type='meta'\)",
        "parameters on the meta device get memory, and values, in `fully_shard`",
    ),
    "replicas": _INTERNAL(
        r"in test_hsdp_broadcast_across_replicas",
        "the test's ranks are threads that share a random number generator; here ranks are "
        "processes",
    ),
    "accepted": _DIFFERS(
        r"AssertionError: (NotImplementedError|RuntimeError|AssertionError) not raised",
        "supported here, but rejected by FSDP2: parameters that are not contiguous, a 2-D mesh "
        "without names, modules on the meta device with `reset_parameters()`, a state dict on "
        "another device",
    ),
    "threads": _INTERNAL(
        r"(?!)",
        "the test calls collectives and parameter groups of FSDP2 without `fully_shard`, in 128 "
        "threads: not run",
    ),
    "state": _INTERNAL(
        r"'function' object has no attribute 'state'|in _check_managed_(modules|states)",
        "the test reads FSDP2's own state of a module",
    ),
    "message": _INTERNAL(
        r"\" does not match \"|String comparison failed|cannot be deep-copied"
        r"|fully_shard was already called on",
        "the same error with another message or of another class",
    ),
    "node-count": _INTERNAL(
        r"in _test_train_mixed_requires_grad[\s\S]*False is not true",
        "the test counts calls of FSDP2's autograd function, after comparing losses and weights",
    ),
    "collectives": _INTERNAL(
        r"in \w*(gradient_accumulation|train_parity_single_group|communication_count"
        r"|manual_reshard|clip_grad_norm)[\s\S]*Scalars are not equal"
        r"|length of the sequences mismatch: 0 != |'mesh_info'",
        "the test counts calls of certain collectives or of FSDP2's methods; here, with gloo, a "
        "reduction is an all-to-all and a large gather consists of broadcasts by all ranks, a "
        "single rank issues no collective, and the consistency check of ranks issues one",
    ),
    "gpu": _GPU(
        r"module 'torch\.cpu' has no attribute|Cannot re-initialize CUDA|not compiled with CUDA"
        r"|argument 'index' \(position 2\) must be int|Expects cpu:0 but got cpu"
        r"|expected scalar type (BFloat16|Half) but found Float|ValueError not raised"
        r"|Mesh should not be bigger than default world size|SkipTest: "
        r"|in _test_gradient_scaler[\s\S]*Booleans mismatch"
        r"|Event\(\) takes no arguments",
        "torch's own `fully_shard` also fails or skips the test on a CPU or on 4 ranks",
    ),
    "gloo": _GPU(
        r"in _test_clip_grad_norm[\s\S]*(Tensor-likes|Scalars) are not close",
        "the order of gloo's sums exceeds the tolerance, also with torch's own `fully_shard`",
    ),
    "half-sums": _DIFFERS(
        r"in _test_(compute_dtype|reduce_dtype_bf16_reduce)[\s\S]*Tensor-likes are not close",
        "on a CPU, gradients communicated in bf16 or fp16 are summed in the order of ranks, and by "
        "gloo in the order of a ring; each term is rounded",
    ),
}


def expected() -> dict[str, frozenset[str]]:
    """Return the expected reasons of each test that does not pass, by the test's name."""
    found: dict[str, frozenset[str]] = {}
    for line in FILE.read_text().splitlines():
        if line and not line.startswith("#"):
            name, *reasons = line.split()
            found[name] = frozenset(reasons)
    return found


def column_of(reasons: Collection[str]) -> str:
    """Return the page's column of a test that does not pass; user-visible reasons come first."""
    kinds = {REASONS[reason].kind for reason in reasons}
    if kinds & {"differs", "rejected"}:
        return "differ, or rejected"
    return "internal" if "internal" in kinds else "need GPUs"


def reason_of(error: str, reasons: Mapping[str, Reason] = REASONS) -> str | None:
    """Return the name of the reason that matches a traceback; None if it is unknown."""
    for name, reason in reasons.items():
        if re.search(reason.error, error):
            return name
    return None
