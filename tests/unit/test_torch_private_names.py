"""`CONTRIBUTING.md` lists all used private names of torch, and torch has these names.

A new version of torch may rename a private name without notice; the test reports the name.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tests.pages import rows_of, section
from tests.processes import ROOT

PAGE = "CONTRIBUTING.md"
PACKAGES = ("megatron_fsdp_v2", "adapters")

EXAMPLES = {
    "torch.Tensor": torch.zeros(1),
    "torch.amp.GradScaler": torch.amp.GradScaler,
    "torch.autograd.graph.Node": torch.autograd.graph.Node,
    "torch.cuda": torch.cuda,
    "torch.distributed.Backend": dist.ProcessGroupGloo,
    "torch.distributed.Backend.Options": dist.ProcessGroupGloo._Options,
    "torch.distributed.ProcessGroup": dist.ProcessGroup,
    "torch.distributed.Work": dist.Work,
    "torch.distributed.device_mesh.DeviceMesh": DeviceMesh,
    "torch.distributed.fsdp.FSDPModule": fsdp.FSDPModule,
    "torch.distributed.tensor.DTensor": DTensor,
    "torch.distributed.tensor.Shard": Shard,
    "torch.nn.Module": nn.Module(),
    "torch.optim.Optimizer": torch.optim.SGD([torch.zeros(1)]),
    "torch._ops.OpOverload": torch.ops.aten.add.Tensor,
    "torch.UntypedStorage": torch.UntypedStorage,
}
"""Owners of private attributes that code reads from objects of a class it does not name."""


def _listed(title: str) -> dict[str, str]:
    """Return the reason by name from the table after a heading."""
    rows = rows_of(section(PAGE, title))
    found = [(name, row[1]) for row in rows for name in re.findall(r"`([\w.]+)`", row[0])]
    assert len(dict(found)) == len(found), "a name is listed twice"
    return dict(found)


MISSING: Any = object()
NEEDED = _listed("Private names of torch")
OPTIONAL = _listed("Optional private names of torch")


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


@functools.cache
def _found(name: str) -> Any:
    """Return the object of a dotted name, or `MISSING`."""
    owner, _, last = name.rpartition(".")
    if owner in EXAMPLES:
        return getattr(EXAMPLES[owner], last, MISSING)
    parent = _found(owner) if owner else None
    if parent is None or (isinstance(parent, types.ModuleType) and not hasattr(parent, last)):
        try:
            return importlib.import_module(name)
        except ImportError:
            return MISSING
    return getattr(parent, last, MISSING)


def _private_part(name: str) -> str | None:
    """Return a dotted name up to its private part; None without a private part.

    For a private module, the result includes the first used name in the module.
    """
    parts = name.split(".")
    private = [index for index, part in enumerate(parts) if _is_private(part)]
    if not private:
        return None
    end = private[-1] + 1
    while end < len(parts) and isinstance(_found(".".join(parts[:end])), types.ModuleType):
        end += 1
    return ".".join(parts[:end])


def _dotted(node: ast.AST, names: dict[str, str]) -> str | None:
    """Return the dotted name of an attribute chain of an import from torch; None for others."""
    attributes = []
    while isinstance(node, ast.Attribute):
        attributes.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in names:
        return None
    return ".".join([names[node.id], *reversed(attributes)])


def _imported(tree: ast.Module) -> dict[str, str]:
    """Return the dotted names in torch of a file's imports and aliases, by name in the file."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known = [alias for alias in node.names if alias.name.split(".")[0] == "torch"]
            names |= {a.asname or "torch": a.name if a.asname else "torch" for a in known}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            is_one = isinstance(target, ast.Name) and isinstance(
                node.value, ast.Attribute | ast.Name
            )
            value = _dotted(node.value, names) if is_one else None
            if value is not None and target.id != value:
                names[target.id] = value
    return names


def _defined_names(tree: ast.AST) -> Iterator[str]:
    """Yield the names of methods and attributes that a file defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and not _overrides(node):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def _overrides(node: ast.FunctionDef) -> bool:
    return any(isinstance(d, ast.Name) and d.id == "override" for d in node.decorator_list)


def _used() -> dict[str, set[str]]:
    """Return the files that use each private name of torch, dotted if a file names its owner."""
    attributes = {name for owner in EXAMPLES.values() for name in dir(owner) if _is_private(name)}
    attributes |= {name for name in dir(torch) if name.startswith(("_foreach_", "_fused_"))}
    # Some versions of torch lack these names.
    attributes |= {name.rpartition(".")[2] for name in OPTIONAL}
    found: dict[str, set[str]] = {}
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    for file in files:
        tree = ast.parse(file.read_text())
        names, defined = _imported(tree), set(_defined_names(tree))
        used = {_private_part(name) for name in names.values()}
        inner = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                dotted = _dotted(node, names)
                if dotted is None:
                    is_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                    if node.attr in attributes and not (is_self and node.attr in defined):
                        used.add(node.attr)
                elif id(node) not in inner:
                    used.add(_private_part(dotted))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                if re.fullmatch(r"torch(\.\w+)*\._\w+(\.\w+)*", node.value):
                    used.add(_private_part(node.value))
                elif node.value in attributes:
                    used.add(node.value)
            elif isinstance(node, ast.FunctionDef) and _overrides(node) and node.name in attributes:
                used.add(node.name)
        for name in used - {None}:
            found.setdefault(name, set()).add(str(file.relative_to(ROOT)))
    return found


def test_the_page_lists_the_private_names_that_the_packages_use() -> None:
    listed = {**NEEDED, **OPTIONAL}
    last = {name.rpartition(".")[2] for name in listed}
    used = _used()
    unlisted = {n: sorted(f) for n, f in used.items() if n not in (listed if "." in n else last)}
    assert unlisted == {}, "give each a row with its reason, or do without"
    stale = [n for n in listed if n not in used and n.rpartition(".")[2] not in used]
    assert stale == [], "nothing uses these"
    assert all(len(reason) > 10 for reason in listed.values())


def test_torch_has_the_private_names_that_the_packages_need() -> None:
    missing = {name: why for name, why in NEEDED.items() if _found(name) is MISSING}
    assert missing == {}, f"torch {torch.__version__} lacks these"
    assert len(NEEDED) > 50


def test_a_name_that_torch_lacks_is_reported() -> None:
    names = ("_C._no_such_name", "Tensor._no_such_name", "_no_such_module.name", "nn.Module._no")
    assert {_found(f"torch.{name}") for name in names} == {MISSING}
