"""The documentation has a row for all that torch's FSDP2 has, and what it says is so.

Torch's own signatures are walked, so that a new version with more to it is noticed.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

from torch.distributed import fsdp

from megatron_fsdp_v2 import FSDPModule, fully_shard
from megatron_fsdp_v2.runtime.torch_fsdp import REFUSED_METHODS

PAGE = (Path(__file__).parents[2] / "docs" / "coming_from_fsdp2.md").read_text()
STATUS = ("supported", "differs", "rejected")


def _rows(title: str) -> dict[str, str]:
    """Name to status, of the first table after a heading."""
    section = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    found: dict[str, str] = {}
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 3 and cells[2] in STATUS:
            names = re.findall(r"`([\w.]+)`", cells[1])
            assert names and not found.keys() & set(names), line
            found |= dict.fromkeys(names, cells[2])
    return found


def test_every_argument_of_fsdp2_has_a_row_and_is_taken() -> None:
    theirs = set(inspect.signature(fsdp.fully_shard).parameters)
    rows, ours = _rows("Arguments"), inspect.signature(fully_shard).parameters
    assert {"module", "mesh", "offload_policy"} <= theirs
    assert theirs - rows.keys() == set()
    assert theirs - ours.keys() == set()


def test_every_field_of_its_policies_has_a_row() -> None:
    fields = {field.name for field in dataclasses.fields(fsdp.MixedPrecisionPolicy)}
    assert "reduce_dtype" in fields
    assert fields - _rows("Arguments").keys() == set()


def test_every_method_of_fsdp2_has_a_row_and_is_ours() -> None:
    theirs = {name for name in vars(fsdp.FSDPModule) if not name.startswith("_")}
    rows = _rows("Methods")
    assert len(theirs) > 15
    assert theirs - rows.keys() == set()
    ours = {name for name in theirs if getattr(FSDPModule, name) is not vars(fsdp.FSDPModule)[name]}
    assert theirs - ours == set()
    rejected = {name for name in REFUSED_METHODS if not name.startswith("_")}
    assert {name for name, status in rows.items() if status == "rejected"} == rejected
    # Methods of newer versions too, where torch has none to be asked.
    assert {name for name in rows if not callable(getattr(FSDPModule, name, None))} == set()


def test_every_public_name_of_fsdp2_has_a_row() -> None:
    rows = _rows("Functions and classes")
    assert "share_comm_ctx" in fsdp.__all__
    assert set(fsdp.__all__) - rows.keys() == set()


def test_methods_take_the_arguments_that_fsdp2_takes() -> None:
    for name, method in inspect.getmembers(fsdp.FSDPModule, inspect.isfunction):
        if name.startswith("_") or name in REFUSED_METHODS:
            continue
        theirs = inspect.signature(method).parameters.values()
        ours = inspect.signature(getattr(FSDPModule, name)).parameters
        assert [p.name for p in theirs if p.name not in ours] == [], name
        for parameter in theirs:
            assert ours[parameter.name].kind == parameter.kind, f"{name}({parameter.name})"
