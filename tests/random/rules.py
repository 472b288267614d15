"""Rules that exclude undefined programs and programs that are documented as unsupported."""

from __future__ import annotations

import math

from tests.random.cases import STRATEGIES, ZERO_3, Case, Node, Options
from tests.random.precision import POLICIES


def all_options(case: Case) -> list[Options]:
    """Return all shardings of a case's model."""
    return [case.options, *(e.options for e in case.program if e.options is not None)]


def broken_rule(case: Case) -> str:
    """Return the first rule that a case breaks; empty if it is allowed."""
    nodes = case.tree.walk()
    parts = {below.id for node in nodes if _differs_by_rank(node) for below in node.walk()}
    penalizes = any(event.do == "penalty" for event in case.program)
    for options in all_options(case):
        if not options.mesh or math.prod(options.mesh) != case.world_size:
            return "every sharding is over all ranks"
        if options.outer == "optim" and (
            len(options.mesh) != 2 or STRATEGIES[0] in options.strategies
        ):
            return "HFSDP needs two axes and a sharded optimizer"
        if options.second and (case.roots == 1 or case.shared_nodes):
            return "roots of two strategies share no module"
        if options.placement == "meshes" and (options.outer == "optim" or options.hook):
            return "HFSDP and hooks of reductions need one mesh"
        gathers = ZERO_3 in options.strategies and case.world_size > 1
        if gathers and any(_differs_by_rank(node) and runs_unit(node, nodes) for node in nodes):
            return "at ZeRO-3 every rank runs every unit"
        if gathers and any(
            node.kind == "checkpoint"
            and any(map(_differs_by_rank, node.walk()))
            and runs_unit(node, nodes)
            for node in nodes
        ):
            return "at ZeRO-3 every rank recomputes every unit"
        if gathers and any(
            known.kind == "again" and known.size in parts
            for unit in nodes
            for known in unit.walk()
            if unit.unit
        ):
            return "at ZeRO-3 every rank uses the parameters of every unit"
        # A detached input removes units from the graph, and so does an in-place operation on the
        # output of a unit that returns its input.
        if gathers and any(
            _differs_by_rank(below) and (below.unit or node.kind == "detached")
            for node in nodes
            if node.kind == "detached" or (node.kind == "in place" and node.how != "input")
            for below in node.walk()
        ):
            return "at ZeRO-3 every rank runs the backward of every unit"
        is_sharded = options.mesh[-1] > 1 or (gathers and options.placement == "meshes")
        if is_sharded and ZERO_3 in options.strategies and penalizes:
            return "at ZeRO-3 a double backward is rejected"
    if any(node.kind == "echo" and node.id in parts for node in nodes):
        return "every rank runs the forwards of a backward"
    if any(not child.unit for node in nodes if node.kind == "echo" for child in node.children):
        return "a backward calls units, whose weights no other module gathers"
    has_torch = any(event.do == "save" and event.how == "torch" for event in case.program)
    if has_torch and any(event.do == "freeze" for event in case.program):
        return "torch's own calls leave out the state of parameters that are frozen now"
    if _saves_with_torch_while_gathered(case):
        return "torch's own calls look for parameters where gathered ones stand"
    if _adds_to_zeros_of_a_failure(case):
        return (
            "gradients zeroed in place after a failed backward are zeroed again by the next forward"
        )
    shares = any(node.kind == "again" for node in nodes) or bool(case.shared_nodes)
    if shares and any(event.do == "functional" for event in case.program):
        return "torch leaves the values of a functional call in a module with two names"
    if any(event.do == "fail" and event.node in parts for event in case.program):
        return "a step fails on all ranks or on none"
    hooks = {event.how for event in case.program if event.do == "hooked"}
    if any(how.endswith("backward") for how in hooks) and any(
        node.kind in ("in place", "own input") for node in nodes
    ):
        return "torch rejects in-place operations next to full backward hooks"
    if hooks - {""} and any(options.compiled for options in all_options(case)):
        return "torch.compile does not look for hooks of modules in later calls"
    if case.autocast and (case.dtype != "float32" or any(node.kind == "gru" for node in nodes)):
        return "autocast casts fp32, and torch has no recurrent layers in bf16 on a CPU"
    if case.autocast and any("muon" in kind for kind in _optimizers(case)):
        return "Muon amplifies differences of bf16"
    given = POLICIES[case.policy].given or ("" if case.dtype in ("float32", "float64") else "none")
    if given and case.dtype != given:
        return "a policy without main weights in 32 bits needs a model that has them"
    if POLICIES[case.policy].sums_in_fp32 and any(
        STRATEGIES[0] in options.strategies or options.placement == "replicate"
        for options in all_options(case)
    ):
        return "reductions that sum in fp32 are reduce-scatters"
    if case.policy and penalizes:
        return "a double backward adds gradients of 16-bit weights in another order"
    if case.autocast and case.policy:
        return "autocast replaces a policy"
    if (case.shared >= 0) != bool(case.shared_nodes):
        return "two roots share a node that exists"
    ids = {node.id for node in case.shared_nodes}
    if ids & parts:
        # Its pass belongs to the root that was sharded last, whatever root runs it.
        return "every rank runs a module that two roots share"
    if any(id_ in ids for pair in case.ties for id_ in pair):
        return "a tie of each root would replace the other's weight of a shared module"
    if any(node.kind == "again" and node.size not in ids for node in case.shared_nodes):
        return "a shared module contains its modules"
    reentrant = any(node.kind == "checkpoint" and node.how == "reentrant" for node in nodes)
    if reentrant and any(event.do in ("input gradient", "penalty") for event in case.program):
        return "torch's reentrant recomputation works with backward() alone"
    if reentrant and "" in hooks:
        return "torch calls a parameter's hook once per reentrant recomputation"
    return ""


def rejection(case: Case, options: Options) -> str:
    """Return the part of the message with which a sharding of a case is rejected, or nothing."""
    if not case.shared_nodes:
        return ""
    if not case.shared_nodes[0].unit:
        return "belongs to another root; call fully_shard on a module that contains both"
    if ZERO_3 in options.strategies and case.world_size > 1:
        return "is below two roots"
    return ""


def _optimizers(case: Case) -> list[str]:
    """Return the kinds of all optimizers of a case."""
    later = [event.how for event in case.program if event.do == "optimizer"]
    return [options.optimizer for options in all_options(case)] + later


def _differs_by_rank(node: Node) -> bool:
    return node.how in ("rank", "uneven")


def runs_unit(node: Node, nodes: list[Node]) -> bool:
    """Return whether a unit may run inside a node, also as a reused module."""
    below = [known for child in node.children for known in child.walk()]
    used = {known.size for known in below if known.kind == "again"}
    again = [known for target in nodes if target.id in used for known in target.walk()]
    deeper = {known.size for known in again if known.kind == "again"}
    # Nested reuse: conservatively True.
    return any(known.unit for known in below + again) or bool(deeper)


def _saves_with_torch_while_gathered(case: Case) -> bool:
    """Return whether torch's calls follow a forward whose backward is missing or failed."""
    is_gathered, slots = False, set()
    for event in case.program:
        if event.do in ("waste", "fail", "forward", "dual"):
            is_gathered = True
            # A forward without a backward stays gathered when an earlier one is over.
            slots = slots | {event.slot} if event.do == "forward" else set()
        elif event.do in ("input gradient", "penalty", "evaluate") or (
            event.do == "backward" and event.slot in slots
        ):
            is_gathered = False
            slots.discard(event.slot)
        elif event.do in ("write", "hooked", "scaler"):
            # These drop the losses of forwards.
            slots.clear()
        elif event.do in ("save", "restore") and event.how == "torch" and is_gathered:
            return True
    return False


def _adds_to_zeros_of_a_failure(case: Case) -> bool:
    """Return whether a loss of weights comes before the forward that repairs a failed backward.

    Gradients that reductions of the failed backward write after `zero_grad(set_to_none=False)`
    cannot be distinguished from those of that loss; the repair drops both.
    """
    is_zeroed = False
    for event in case.program:
        if event.do == "fail":
            is_zeroed = event.how != "forward" and not event.flag
        elif event.do == "weights" and is_zeroed:
            return True
        elif event.do in ("forward", "evaluate", "waste"):
            is_zeroed = False
    return False
