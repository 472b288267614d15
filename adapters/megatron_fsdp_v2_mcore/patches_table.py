"""The work of `megatron-fsdp-v2 patches`: list the patches, and check whether each one fits."""

from __future__ import annotations

import json
import sys

from megatron_cpu_rehearsal import patches as rehearsals
from megatron_cpu_rehearsal.te.patches import BEFORE_IMPORT
from megatron_fsdp_v2_mcore.patches import PATCHES, SUPPORTED, check_patch, megatron_version
from megatron_fsdp_v2_patching import Patch


def run(*, as_json: bool) -> int:
    """Print the table.

    Args:
        as_json: Whether to print JSON instead.

    Returns:
        1 if a patch does not fit, 2 if Megatron is not installed, otherwise 0.
    """
    try:
        version = megatron_version()
    except RuntimeError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    rows = [_describe(patch, _when(patch), "uninstall()") for patch in PATCHES]
    rehearsal = [
        _describe(patch, f"under --cpu-rehearsal{flags}", "the end of the rehearsal")
        for patches, flags in (
            (rehearsals.PATCHES, ""),
            (rehearsals.WITHOUT_TRANSFORMER_ENGINE, " --transformer-impl local"),
            (BEFORE_IMPORT, " --transformer-impl transformer_engine"),
        )
        for patch in patches
    ]
    if as_json:
        versions = {"megatron_core": version, "supported": f"{SUPPORTED}.x"}
        text = json.dumps({**versions, "patches": rows, "rehearsal": rehearsal}, indent=2)
    else:
        text = "\n".join(
            [f"megatron-core {version} (supported: {SUPPORTED}.x)", ""]
            + [_paragraph(row) for row in (*rows, *rehearsal)]
        )
    sys.stdout.write(f"{text}\n")
    fits = all(row["check"] in ("fits", "target missing") for row in (*rows, *rehearsal))
    return 0 if fits else 1


def _paragraph(row: dict[str, str]) -> str:
    details = "".join(f"  {key:<8}{row[key]}\n" for key in row if key != "name")
    return f"{row['name']}\n{details}"


def _describe(patch: Patch, when: str, undone_by: str) -> dict[str, str]:
    try:
        result = "fits" if check_patch(patch) else "target missing"
    except RuntimeError as error:
        result = str(error)
    return {
        "name": patch.name,
        "target": patch.target,
        "reason": patch.reason,
        "when": when,
        "check": result,
        "undo": f"{undone_by} puts the original back",
    }


def _when(patch: Patch) -> str:
    if not patch.selected:
        return "installed"
    if patch.target.startswith("megatron.core."):
        return "selected by the command line, or enabled"
    return "selected by the command line"
