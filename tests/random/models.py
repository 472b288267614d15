"""Builds the modules that a case describes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as recomputed

from megatron_fsdp_v2.optim import Muon, flat_optimizer
from tests.random.cases import Case, Node
from tests.random.precision import Casts
from tests.reference.failing import PlannedFailure, fail
from tests.reference.models import Parts

INPUT = 4
OUTPUT = 3


@dataclass
class Call:
    """Arguments of a forward besides its input.

    Attributes:
        tokens: For embeddings, `(rows,)`.
        chosen: Nodes that this forward skips, or runs once more, on this rank.
        chosen_second: The same of the second root.
        fail: Node whose forward or backward fails; -1 for none.
        fails_in: `forward`, `backward` or `recomputation`.
        other: With two roots, the one that a backward of this root may run.
        casts: Of a forward of the plain model with a mixed-precision policy.
    """

    tokens: torch.Tensor
    chosen: frozenset[int] = frozenset()
    chosen_second: frozenset[int] = frozenset()
    fail: int = -1
    fails_in: str = ""
    other: Callable[[torch.Tensor], Any] | None = None
    casts: Casts | None = None


class Named(NamedTuple):
    """A structured value."""

    first: torch.Tensor
    second: torch.Tensor | None


PACKS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    # Functions that wrap a module's output tensor, and that unwrap it in the caller.
    "tensor": (lambda y: y, lambda out: out),
    "tuple": (lambda y: (y * 0.5, y.sin()), lambda out: out[0] + out[1]),
    "list": (lambda y: [y * 0.5, [y.sin()]], lambda out: out[0] + out[1][0]),
    "dict": (lambda y: {"a": y * 0.5, "b": {"c": y.cos()}}, lambda out: out["a"] + out["b"]["c"]),
    "dataclass": (
        lambda y: Parts(y * 0.5, {"more": [y.sin()], "text": "x"}),
        lambda out: out.first + out.rest["more"][0],
    ),
    "namedtuple": (lambda y: Named(y * 0.5, y.sin()), lambda out: out.first + out.second),
    "none": (lambda y: (None, y, None), lambda out: out[1]),
    "views": (lambda y: (y[:, :2], y[:, 2:]), lambda out: torch.cat(out, dim=1)),
    "chunks": (lambda y: y.chunk(2, dim=1), lambda out: torch.cat(out, dim=1)),
    "transposed": (lambda y: y.t(), lambda out: out.t()),
    "nondifferentiable": (
        lambda y: (y, y.detach() * 0.3, y.argmax(1)),
        lambda out: out[0] + out[1],
    ),
    "twice": (lambda y: (y, y), lambda out: out[0] + 0.5 * out[1]),
    "one unused": (lambda y: (y, y * 2.0), lambda out: out[0]),
    "object": (lambda y: SimpleNamespace(value=y), lambda out: out.value),
}


class Part(nn.Module):
    """Base of all modules of the tree; `COMPUTE` has the forwards of kinds without parameters."""

    def __init__(self, node: Node, children: list[nn.Module], width: int) -> None:
        super().__init__()
        self.node = node
        self.below = nn.ModuleList(children)
        self.make(width)

    def make(self, width: int) -> None:
        """Create the module's parameters."""

    def forward(self, x: torch.Tensor, call: Call) -> Any:
        fails = call.fail == self.node.id
        if fails and call.fails_in == "forward":
            raise PlannedFailure
        if fails and call.fails_in == "recomputation" and torch._C._current_graph_task_id() != -1:
            raise PlannedFailure
        if call.casts is None:
            y = self.compute(x, call)
        else:
            with call.casts.inside([self, *_modules_except(self, "below")]):
                y = self.compute(x, call)
        if fails and call.fails_in == "backward" and getattr(y, "requires_grad", False):
            y.register_hook(fail)
        return y

    def compute(self, x: torch.Tensor, call: Call) -> Any:
        """Compute the output of this kind of module."""
        return COMPUTE[self.node.kind](self, x, call)

    def inside(self, x: torch.Tensor, call: Call) -> torch.Tensor:
        """Run the children in sequence."""
        for child in self.below:
            x = child(x, call)
        return x


def _modules_except(module: nn.Module, name: str) -> list[nn.Module]:
    """Return all modules inside, except those in one child."""
    children = [child for known, child in module.named_children() if known != name]
    return [inner for child in children for inner in child.modules()]


class LinearPart(Part):
    """A linear layer, added to its input."""

    def make(self, width: int) -> None:
        self.linear = nn.Linear(width, width, bias=self.node.how != "no bias")

    def compute(self, x: torch.Tensor, call: Call) -> torch.Tensor:
        return x + 0.5 * torch.tanh(self.linear(x.to(self.linear.weight.dtype))).to(x.dtype)


class MlpPart(Part):
    """Norm and two linear layers, added to its input."""

    def make(self, width: int) -> None:
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, self.node.size)
        self.down = nn.Linear(self.node.size, width)

    def compute(self, x: torch.Tensor, call: Call) -> torch.Tensor:
        y = x.to(self.norm.weight.dtype)
        return x + 0.5 * self.down(torch.tanh(self.up(self.norm(y)))).to(x.dtype)


class EmbedPart(Part):
    """An embedding of the tokens, added to its input."""

    def make(self, width: int) -> None:
        self.table = nn.Embedding(self.node.size, width)

    def compute(self, x: torch.Tensor, call: Call) -> torch.Tensor:
        return x + 0.3 * self.table(call.tokens % self.node.size).to(x.dtype)


class GruPart(Part):
    """A recurrent layer, added to its input; it keeps a list of its parameters."""

    def make(self, width: int) -> None:
        self.gru = nn.GRU(width, width, bias=self.node.how != "no bias")

    def compute(self, x: torch.Tensor, call: Call) -> torch.Tensor:
        out, _ = self.gru(x.to(self.gru.weight_ih_l0.dtype))
        return x + 0.5 * out.to(x.dtype)


class NormedPart(Part):
    """A linear layer whose weight is parametrized by its norm and direction."""

    def make(self, width: int) -> None:
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(width, width))

    def compute(self, x: torch.Tensor, call: Call) -> torch.Tensor:
        return x + 0.5 * torch.tanh(self.layer(x.to(self.layer.weight.dtype))).to(x.dtype)


class OddPart(Part):
    """Parameters of unusual shapes, and a buffer."""

    def make(self, width: int) -> None:
        shape = tuple(int(size) for size in self.node.how.split("x") if size)
        self.values = nn.Parameter(torch.randn(shape) * 0.5)
        numel = math.prod(shape)
        self.register_buffer("factors", torch.linspace(-1.0, 2.0, numel).reshape(shape))

    def compute(self, x: torch.Tensor, call: Call) -> torch.Tensor:
        # A gradient in a wider dtype than that of a gathered weight would not be rounded to it.
        factors = self.factors.to(self.values.dtype)
        factor = torch.tanh((self.values * factors).sum()).to(x.dtype)
        return x * (1.0 + 0.2 * factor)


class SparePart(Part):
    """A layer and an unused parameter."""

    def make(self, width: int) -> None:
        self.spare = nn.Parameter(torch.randn(3, 2))
        self.scale = nn.Parameter(torch.ones(width))

    def compute(self, x: torch.Tensor, call: Call) -> torch.Tensor:
        return x * self.scale.to(x.dtype)


def _repeat(part: Part, x: torch.Tensor, call: Call) -> torch.Tensor:
    """Run the children several times; once more if the node is chosen."""
    for _ in range(max(1, part.node.size) + (part.node.id in call.chosen)):
        x = part.inside(x, call)
    return x


def _checkpoint(part: Part, x: torch.Tensor, call: Call) -> Any:
    """Run the children and recompute them in the backward."""
    return recomputed(part.inside, x, call, use_reentrant=part.node.how == "reentrant")


def _dead(part: Part, x: torch.Tensor, call: Call) -> torch.Tensor:
    """Run the children and drop their output."""
    part.inside(x, call)
    return x


def _no_grad(part: Part, x: torch.Tensor, call: Call) -> torch.Tensor:
    """Run the children without gradients."""
    with torch.no_grad():
        y = part.inside(x, call)
    return x + 0.1 * y


def _in_place(part: Part, x: torch.Tensor, call: Call) -> torch.Tensor:
    """Apply in-place operations to the input or output of the children."""
    how = part.node.how
    if how == "input":
        x = x * 1.0
        x.mul_(0.9)
    y = part.inside(x, call)
    # If a child returns its input, a unit returns a view of it and a plain module the input itself.
    is_new = y.data_ptr() != x.data_ptr()
    if how == "output" and is_new:
        y.mul_(0.9)
    elif how == "view" and is_new:
        y[:, :1].mul_(0.5)
    return y


def _unpack(part: Part, x: torch.Tensor, call: Call) -> torch.Tensor:
    """Call a child that may return a structured output, by keyword in some variants."""
    for child in part.below:
        x = child(x=x, call=call) if part.node.how == "keywords" else child(x, call)
        node = getattr(child, "node", None)
        if node is not None and node.kind == "pack":
            x = PACKS[node.how][1](x)
    return x


def _sum_of(output: Any) -> torch.Tensor:
    return torch.stack([tensor.detach().double().mean() for tensor in tensors_of(output)]).sum()


class _ScaledInBackward(torch.autograd.Function):
    """The identity; its backward multiplies the gradient by the result of a function."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, factor: Callable[[], torch.Tensor]) -> torch.Tensor:
        ctx.factor = factor
        # torch rejects in-place operations on a view that a Function returns.
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * ctx.factor(), None


def _echo(part: Part, x: torch.Tensor, call: Call) -> torch.Tensor:
    """Run the children; the backward runs them again, or another root, and uses the output."""
    how, seen = part.node.how, x.detach().clone()

    def factor() -> torch.Tensor:
        with torch.enable_grad() if "grad" in how else torch.no_grad():
            if "other" in how and call.other is not None:
                out = call.other(seen)
            else:
                # A failure of the planned node belongs to the pass itself.
                out = part.inside(seen, replace(call, fail=-1))
        return 1.0 + 0.1 * torch.tanh(_sum_of(out)).to(x.dtype)

    y = part.inside(x, call)
    if not y.requires_grad:
        return y
    if "function" in how:
        return _ScaledInBackward.apply(y, factor)
    y = y.view_as(y)
    y.register_hook(lambda grad: grad * factor())
    return y


COMPUTE: dict[str, Callable[[Any, torch.Tensor, Call], Any]] = {
    "act": lambda part, x, call: torch.tanh(x),
    "seq": Part.inside,
    "repeat": _repeat,
    "checkpoint": _checkpoint,
    # The children get a detached input; their output is added.
    "detached": lambda part, x, call: x + 0.5 * part.inside(x.detach(), call),
    "dead": _dead,
    "echo": _echo,
    "no grad": _no_grad,
    # The children are skipped if the node is chosen.
    "branch": lambda part, x, call: x if part.node.id in call.chosen else part.inside(x, call),
    "in place": _in_place,
    # Changes its input in place; the caller does not use the input again.
    "own input": lambda part, x, call: part.inside(x.mul_(0.9), call),
    # Passes its child an input without other references, so the child may change the input.
    "fresh": lambda part, x, call: part.inside(x * 1.0, call),
    # Returns a structured output.
    "pack": lambda part, x, call: PACKS[part.node.how][0](part.inside(x, call)),
    "unpack": _unpack,
}
LEAVES: dict[str, type[Part]] = {
    "linear": LinearPart,
    "mlp": MlpPart,
    "embed": EmbedPart,
    "gru": GruPart,
    "normed": NormedPart,
    "odd": OddPart,
    "spare": SparePart,
}
KINDS = {**LEAVES, **dict.fromkeys(COMPUTE, Part)}


class Tree(nn.Module):
    """The root: an input layer, the tree, an output layer."""

    def __init__(self, case: Case, shared: Mapping[int, nn.Module] | None = None) -> None:
        super().__init__()
        self.output_kind = case.output
        self.input = nn.Linear(INPUT, case.width)
        self.known: dict[int, nn.Module] = dict(shared or {})
        self.body = _built(case.tree, case, self.known)
        self.output = nn.Linear(case.width, OUTPUT)

    def forward(self, x: torch.Tensor, call: Call) -> Any:
        if call.casts is None:
            return self.compute(x, call)
        with call.casts.inside(_modules_except(self, "body")):
            return self.compute(call.casts.input(x), call)

    def compute(self, x: torch.Tensor, call: Call) -> Any:
        """Compute the output."""
        y = self.output(self.body(self.input(x), call))
        return PACKS[self.output_kind][0](y)


class Pair(nn.Module):
    """Two models in one loss, each a root of its own; this module is not sharded.

    They may share a module.
    """

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.first = Tree(case)
        known = self.first.known
        shared = {node.id: known[node.id] for node in case.shared_nodes if node.id in known}
        self.second = Tree(case, shared)
        self.dtype = getattr(torch, case.dtype)

    @property
    def known(self) -> dict[int, nn.Module]:
        """The modules of each node in both models."""
        second = self.second.known
        return {id_: nn.ModuleList([part, second[id_]]) for id_, part in self.first.known.items()}

    def forward(self, x: torch.Tensor, call: Call) -> Any:
        call_of_second = replace(call, chosen=call.chosen_second)

        def other(seen: torch.Tensor) -> Any:
            # A forward under autocast computes in another dtype; its backward has no autocast.
            x = seen[:, :1].expand(-1, INPUT).to(self.dtype)
            return self.second(x, replace(call_of_second, fail=-1))

        return self.first(x, replace(call, other=other)), self.second(x, call_of_second)


def _built(node: Node, case: Case, known: dict[int, nn.Module]) -> nn.Module:
    if node.id in known:
        # A module of the first root.
        return known[node.id]
    children = []
    for child in node.children:
        if child.kind != "again":
            children.append(_built(child, case, known))
        elif child.size in known:
            # The same module registered a second time; the first is complete by now.
            children.append(known[child.size])
    part = KINDS[node.kind](node, children, case.width)
    own = [p for name, p in part.named_parameters() if not name.startswith("below.")]
    for param in own:
        param.requires_grad_(not node.frozen)
        param.data = param.data.double() if node.double else param.data
    known[node.id] = part
    return part


def build(case: Case, device: str = "cpu") -> Any:
    """Build the model of a case, a `Tree` or a `Pair`; identical at every call on a CPU."""
    torch.manual_seed(case.seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, case.dtype))
    try:
        with torch.device(device):
            model = Tree(case) if case.roots == 1 else Pair(case)
    finally:
        torch.set_default_dtype(before)
    for root in roots(model):
        for first, second in case.ties:
            _tie(root.known.get(first), root.known.get(second))
    return model


def roots(model: Any) -> list[Any]:
    """Return the outermost modules that are sharded."""
    return [model.first, model.second] if isinstance(model, Pair) else [model]


def _tie(first: Any, second: Any) -> None:
    sites = []
    for part in (first, second):
        layer = getattr(part, "linear", None) or getattr(part, "table", None)
        if layer is None:
            return
        sites.append(layer)
    one, other = (layer.weight for layer in sites)
    alike = one.shape == other.shape and one.dtype == other.dtype
    if alike and one.requires_grad == other.requires_grad:
        sites[1].weight = one


def units(model: Any, case: Case) -> Iterator[nn.Module]:
    """Modules to shard, children first, each root last, and each module once."""
    yielded: set[nn.Module] = set()
    for root in roots(model):
        for unit in _units_of(root, case):
            if unit not in yielded:
                yielded.add(unit)
                yield unit


def _units_of(model: Tree, case: Case) -> Iterator[nn.Module]:
    if case.ends == "units":
        yield model.input
        yield model.output
    # A module that is reused inside another unit must be sharded before that unit.
    seen: set[nn.Module] = set()

    def visit(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            if child not in seen:
                seen.add(child)
                yield from visit(child)
        if isinstance(module, Part) and module.node.unit:
            yield module

    # Create the list first: sharding changes classes during the walk.
    yield from list(visit(model.body))
    yield model


def tensors_of(output: Any) -> list[torch.Tensor]:
    """Return all floating-point tensors in a root's output, in order."""
    if isinstance(output, torch.Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, Parts):
        output = [output.first, output.rest]
    if isinstance(output, SimpleNamespace):
        output = [output.value]
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, tuple | list):
        return [tensor for item in output for tensor in tensors_of(item)]
    return []


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative distance of two tensors."""
    return float((found - expected).norm() / expected.norm().clamp(min=1e-3))


def loss_of(output: Any) -> torch.Tensor:
    """Return a loss of all outputs of a module."""
    parts = [tensor.double().square().mean() for tensor in tensors_of(output)]
    return torch.stack(parts).sum()


def _muon(params: Any, block_rows: int | None = None, **options: Any) -> Muon:
    """Muon for matrices and stacks of matrices, and AdamW for other parameters."""
    kinds: dict[str, list[Any]] = {"blocks": [], "whole": [], "others": []}
    for param in params:
        kind = "whole" if param.ndim in (2, 3) else "others"
        if param.ndim == 2 and block_rows and not param.shape[0] % block_rows:
            kind = "blocks"
        kinds[kind].append(param)
    groups = [
        {"params": kinds["blocks"], "block_rows": block_rows},
        {"params": kinds["whole"]},
        {"params": kinds["others"], "use_muon": False},
    ]
    # Few iterations: each one amplifies rounding errors of gradients.
    fixed: Any = {"lr": 0.01, "ns_steps": 2, "ns_dtype": torch.float64, "adamw_eps": 1e-2}
    return Muon([group for group in groups if group["params"]], **fixed, **options)


FLAT_SGD, FLAT_ADAMW = flat_optimizer(torch.optim.SGD), flat_optimizer(torch.optim.AdamW)

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.03, momentum=0.9),
    "decay": lambda params: torch.optim.SGD(params, lr=0.03, momentum=0.9, weight_decay=0.1),
    # A large eps: for an almost zero gradient, Adam's quotient amplifies rounding errors.
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-2, foreach=False),
    "adamw foreach": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-2, foreach=True),
    "adamw fused": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-2, fused=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01, eps=1e-2),
    "muon": _muon,
    "muon gram": functools.partial(_muon, ns_method="gram", nesterov=False),
    "muon blocks": functools.partial(_muon, block_rows=2),
    "momentum flat": lambda params: FLAT_SGD(params, lr=0.03, momentum=0.9, foreach=True),
    "adamw flat": lambda params: FLAT_ADAMW(params, lr=0.01, eps=1e-2, foreach=False),
}
