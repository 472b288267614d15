"""What a case may not do, because it has no meaning or is documented as refused."""

from __future__ import annotations

from tests.random.cases import STRATEGIES, ZERO_3, Case, Node, Options

SWITCHES: dict[str, bool] = {
    # `torch.func.functional_call` overwrites the weights for good.
    "functional": False,
    # A double backward at ZeRO-3 reads weights that are gone.
    "penalty": False,
    # A unit that changes its input in place raises: it is an output of a custom autograd function.
    "own input": False,
    # Below ZeRO-3: ranks that run a unit a different number of times, or skip one and have several
    # backwards of a graph, pair reductions of different units; `check_ranks="always"` refuses that.
    "uneven calls": False,
    # A forward without backward leaves parameters gathered: `checkpoint` and `requires_grad_` then
    # act on those.
    "gathered at rest": False,
    # A reduction that was under way lands in the gradient after `zero_grad(set_to_none=False)`.
    "zeroed after a failed backward": False,
    # Units that return a plain object read weights that are gone, at ZeRO-3.
    "object": False,
    # At ZeRO-3, a tied weight that some ranks use outside of its owner is reduced twice there.
    "tied and uneven": False,
    # A unit that is recomputed again is dropped while its forward runs, by a unit inside it.
    "recomputed inside": False,
    # Gradients are wrong where the recomputed regions of ranks differ, every unit run by all.
    "recomputed by rank": False,
}
"""Features that are not generated for now, with `False`, and what fails."""


def all_options(case: Case) -> list[Options]:
    """All ways a case shards its model."""
    return [case.options, *(e.options for e in case.program if e.options is not None)]


def broken_rule(case: Case) -> str:
    """The first rule that a case breaks; empty if it is allowed."""
    nodes = case.tree.walk()
    for options in all_options(case):
        if _size(options) != case.world_size:
            return "every sharding is over all ranks"
        if options.outer == "optim" and (
            len(options.mesh) != 2 or options.strategy == STRATEGIES[0]
        ):
            return "HFSDP needs two axes and a sharded optimizer"
        gathers = options.strategy == ZERO_3 and case.world_size > 1
        if gathers and any(_differs_by_rank(node) and runs_unit(node, nodes) for node in nodes):
            return "at ZeRO-3 every rank runs every unit"
        if gathers and any(
            _differs_by_rank(n) for d in nodes if d.kind == "detached" for n in d.walk()
        ):
            return "at ZeRO-3 every rank runs the backward of every unit"
    if not SWITCHES["object"] and any(n.how == "object" and n.unit for n in nodes):
        return "a unit returns an object that hides its tensors"
    if not SWITCHES["tied and uneven"] and case.ties and any(_differs_by_rank(n) for n in nodes):
        return "a tied parameter is used a different number of times"
    if not SWITCHES["recomputed inside"] and _recomputes_nested_units(nodes):
        return "a unit with units inside is recomputed several times in a region"
    regions = [below for node in nodes if node.kind == "checkpoint" for below in node.walk()]
    above = [n for n in nodes if n.kind == "checkpoint"]
    if not SWITCHES["recomputed by rank"] and above and any(_differs_by_rank(n) for n in regions):
        return "ranks recompute a different number of operations"
    has_torch = any(event.do == "save" and event.how == "torch" for event in case.program)
    if has_torch and any(event.do == "freeze" for event in case.program):
        return "torch's own calls leave out the state of parameters that are frozen now"
    if not SWITCHES["uneven calls"] and _calls_are_uneven(case):
        return "ranks run a unit a different number of times"
    if not SWITCHES["gathered at rest"] and _is_gathered_at_rest(case):
        return "a forward without backward comes before a change of parameters"
    zeroed = any(e.do == "fail" and e.how != "forward" and not e.flag for e in case.program)
    if zeroed and not SWITCHES["zeroed after a failed backward"]:
        return "gradients are set to zero after a failed backward"
    if _shares_modules_between_units(case.tree):
        return "a module that is used in two units has to be a unit"
    parts = {below.id for node in nodes if _differs_by_rank(node) for below in node.walk()}
    if any(event.do == "fail" and event.node in parts for event in case.program):
        return "a step fails on all ranks or on none"
    reentrant = any(node.kind == "checkpoint" and node.how == "reentrant" for node in nodes)
    if reentrant and any(event.do in ("input gradient", "penalty") for event in case.program):
        return "torch's reentrant recomputation works with backward() alone"
    return ""


def _size(options: Options) -> int:
    size = 1
    for axis in options.mesh:
        size *= axis
    return size


def _differs_by_rank(node: Node) -> bool:
    return node.how in ("rank", "uneven")


def runs_unit(node: Node, nodes: list[Node]) -> bool:
    """Whether a unit may run inside a node, also one that is used again there."""
    below = [known for child in node.children for known in child.walk()]
    used = {known.size for known in below if known.kind == "again"}
    again = [known for target in nodes if target.id in used for known in target.walk()]
    deeper = {known.size for known in again if known.kind == "again"}
    # A module that is used again inside one that is used again: say yes, to be short.
    return any(known.unit for known in below + again) or bool(deeper)


def _calls_are_uneven(case: Case) -> bool:
    """Whether ranks may use a unit a different number of times in a backward."""
    nodes = case.tree.walk()
    if not any(_differs_by_rank(node) for node in nodes):
        return False
    several = any(node.kind in ("again", "repeat") for node in nodes)
    kinds = ("input gradient", "penalty", "fail")
    again = any(e.do in kinds or e.slot or "retain" in e.how for e in case.program)
    return several or again or any(options.check == "always" for options in all_options(case))


def _is_gathered_at_rest(case: Case) -> bool:
    is_gathered = False
    for event in case.program:
        if event.do in ("waste", "fail", "forward"):
            is_gathered = True
        elif event.do in ("backward", "input gradient", "penalty", "evaluate"):
            is_gathered = False
        elif event.do in ("freeze", "save", "restore", "load") and is_gathered:
            return True
    return False


def _shares_modules_between_units(tree: Node) -> bool:
    """Whether a module that is no unit is registered in two of them."""
    owners: dict[int, int] = {}
    uses: list[tuple[int, int]] = []

    def visit(node: Node, owner: int) -> None:
        owners[node.id] = owner = node.id if node.unit else owner
        if node.kind == "again":
            uses.append((node.size, owner))
        for child in node.children:
            visit(child, owner)

    visit(tree, -1)
    return any(owners.get(size, size) not in (owner, size) for size, owner in uses)


def _recomputes_nested_units(nodes: list[Node]) -> bool:
    regions = [below for node in nodes if node.kind == "checkpoint" for below in node.walk()]
    nested = any(n.unit and any(below.unit for below in n.walk()[1:]) for n in regions)
    return nested and any(n.kind in ("repeat", "again") for n in nodes)
