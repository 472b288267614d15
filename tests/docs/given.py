"""Names that short examples use without defining them: a model, an optimizer, a training step."""

from __future__ import annotations

import ast
import builtins
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed.wrapping import wrap
from tests.reference.models import Block

WIDTH = 8


class Model(nn.Module):
    """The model of the examples, with layers in `model.layers`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(WIDTH) for _ in range(3))
        self.output = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


def free_names(tree: ast.AST) -> set[str]:
    """Return the names that code reads and does not bind."""
    bound = set(dir(builtins))
    read: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {(name.asname or name.name).partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return read - bound


def prepare(code: str, names: dict[str, Any]) -> None:
    """Define the names that an example reads and that are not defined yet.

    A model is sharded, unless the example shards a model itself.

    Args:
        code: The example.
        names: Namespace of the example, with names of earlier examples on the page.

    Raises:
        NameError: A name is unknown.
    """
    tree = ast.parse(code)
    called = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    shards = any(getattr(function, "id", "") == "fully_shard" for function in called)
    wanted = free_names(tree) - names.keys()
    unknown = sorted(wanted - PROVIDERS.keys())
    if unknown:
        raise NameError(
            f"nothing is called {unknown[0]!r}: import or make it in the example, on the page "
            "before it, or add it to tests/docs/given.py"
        )
    # A step needs a model and an optimizer, even if the example does not name them.
    for name in ("train_step", "optimizer", "model", "mesh"):
        wanted |= NEEDS.get(name, set()) & (PROVIDERS.keys() - names) if name in wanted else set()
    for name, provider in PROVIDERS.items():
        if name in wanted and name not in names:
            names[name] = provider(names, shards)


def _mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))


def _sharded(mesh: Any) -> Any:
    model = Model()
    return wrap(model, model.layers, mesh=mesh)


def _train_step(names: dict[str, Any]) -> None:
    names["model"](torch.randn(4, WIDTH)).square().mean().backward()
    if "optimizer" in names:
        names["optimizer"].step()
        names["optimizer"].zero_grad()


# In order of creation: a provider may use the names before it.
PROVIDERS: dict[str, Callable[[dict[str, Any], bool], Any]] = {
    "mesh": lambda names, shards: _mesh(),
    "model": lambda names, shards: Model() if shards else _sharded(names["mesh"]),
    "optimizer": lambda names, shards: torch.optim.AdamW(names["model"].parameters(), lr=0.01),
    "train_step": lambda names, shards: functools.partial(_train_step, names),
    "build_model": lambda names, shards: Model,
    "log": lambda names, shards: lambda *values: names.setdefault("logged", []).append(values),
}
NEEDS: dict[str, set[str]] = {
    "train_step": {"optimizer", "model", "mesh"},
    "optimizer": {"model", "mesh"},
    "model": {"mesh"},
}


def tensor_parallel_modules() -> dict[str, Any]:
    """Return modules with TP-local shards as plain parameters, for one tensor-parallel rank."""

    kinds = {
        n: type(n, (nn.Linear,), {}) for n in ("MyColumnLinear", "MyRowLinear", "MyGatedLinear")
    }
    kinds["MyEmbedding"] = type("MyEmbedding", (nn.Embedding,), {})
    model = nn.Module()
    model.words = kinds["MyEmbedding"](2 * WIDTH, WIDTH)
    gated, row = kinds["MyGatedLinear"], kinds["MyRowLinear"]
    model.layers = nn.ModuleList(
        nn.Sequential(nn.LayerNorm(WIDTH), gated(WIDTH, 2 * WIDTH), row(WIDTH, WIDTH))
        for _ in range(2)
    )
    model.head = kinds["MyColumnLinear"](WIDTH, WIDTH)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    return {"model": model, "mesh": mesh, **kinds}


def matrix_parameters() -> dict[str, Any]:
    """Return sharded matrices, their updates, and a function of matrices."""
    names: dict[str, Any] = {}
    prepare("model", names)
    params = [param for param in names["model"].parameters() if param.ndim == 2]

    def my_polar_factor(matrices: torch.Tensor) -> torch.Tensor:
        left, _, right = torch.linalg.svd(matrices, full_matrices=False)
        return left @ right

    updates = [torch.randn_like(param.to_local()) for param in params]
    return {**names, "params": params, "updates": updates, "my_polar_factor": my_polar_factor}
