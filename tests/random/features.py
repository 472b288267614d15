"""What a case covers, in words, and what all cases together have to cover."""

from __future__ import annotations

from tests.random.cases import STRATEGIES, Case
from tests.random.generate import MESHES, OPTIMIZERS, OUTPUTS, PACKS, SHAPES
from tests.random.models import KINDS
from tests.random.rules import SWITCHES, all_options


def features_of(case: Case) -> set[str]:
    """What a case covers."""
    nodes = case.tree.walk()
    found = {f"{case.world_size} ranks", case.dtype, f"output {case.output}"}
    for options in all_options(case):
        shape = "x".join(map(str, options.mesh))
        found |= {f"mesh {shape}", options.strategy, f"check_ranks {options.check}"}
        found |= {"HFSDP"} if options.outer == "optim" else set()
        found |= {"trace pool"} if options.pool else set()
        found |= {"prefetch by bytes"} if options.ahead is not None else set()
        found |= {"gathers after a step"} if options.early else set()
        found |= {"buckets"} if options.bucket is not None else set()
    found.add(f"optimizer {case.options.optimizer}")
    for node in nodes:
        found.add(f"module {node.kind}")
        if node.kind in ("pack", "odd", "checkpoint", "branch", "in place"):
            found.add(f"{node.kind} {node.how or 'non-reentrant'}")
        for name in ("unit", "frozen", "double"):
            found |= {name} if getattr(node, name) else set()
        if node.unit and any(below.unit for below in node.walk()[1:]):
            found.add("nested units")
        if node.kind == "checkpoint" and any(n.kind == "checkpoint" for n in node.walk()[1:]):
            found.add("nested recomputation")
    found |= {"ties"} if case.ties else set()
    for event in case.program:
        found.add(f"event {event.do}" + (f", {event.how}" if event.how else ""))
        found |= {"another sharding after a load"} if event.options is not None else set()
    return found


def generated_features() -> set[str]:
    """What many cases together have to cover."""
    found = {f"{size} ranks" for size in MESHES}
    found |= {"mesh " + "x".join(map(str, mesh)) for meshes in MESHES.values() for mesh in meshes}
    found |= {*STRATEGIES, "HFSDP", "trace pool", "ties", "nested units", "nested recomputation"}
    found |= {"prefetch by bytes", "gathers after a step", "buckets"}
    found |= {"unit", "frozen", "double", "float32", "float64", "another sharding after a load"}
    found |= {f"optimizer {name}" for name in OPTIMIZERS} | {f"output {how}" for how in OUTPUTS}
    found |= {f"pack {how}" for how in PACKS} | {f"odd {shape}" for shape in SHAPES}
    found |= {f"module {kind}" for kind in [*KINDS, "again"]}
    found |= {"checkpoint reentrant", "checkpoint non-reentrant", "branch step", "branch rank"}
    found |= {f"check_ranks {check}" for check in ("once", "never", "always")}
    found |= {f"event fail, {how}" for how in ("forward", "backward", "recomputation")}
    found |= {f"event save{how}" for how in ("", ", async", ", torch")}
    found |= {"event restore", "event restore, torch", "event evaluate, inference"}
    found |= {"event backward, " + h for h in ("retain", "no sync", "not last", "retain no sync")}
    simple = ["forward", "backward", "evaluate", "waste", "input gradient", "penalty", "zero"]
    simple += ["weights"]
    simple += ["clip", "step", "freeze", "state", "full", "load", "functional"]
    found |= {f"event {do}" for do in simple}
    off = {name for name, is_on in SWITCHES.items() if not is_on}
    found -= {f"event {name}" for name in off} | {f"pack {name}" for name in off}
    if "own input" in off:
        found -= {"module own input", "module fresh"}
    return found
