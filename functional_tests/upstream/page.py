"""Tables about Megatron-LM's configurations: what a run measured, printed with `--tables`."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from functional_tests.trainings import Difference
from functional_tests.upstream.configurations import Configuration
from functional_tests.upstream.shrink import Shrunk
from functional_tests.upstream.sides import left_out
from tests.pages import table, wrapped

_TRAINED = """
The largest relative difference from DDP of the losses and of the norms (of gradients before
clipping, of parameters): in fp32, with `--bf16` or `--fp16` left out where given, and in the
configuration's own precision. An empty cell was not measured in this run.
"""
_HEAD = (
    *("configuration", "stands for", "ranks", "loss", "norm"),
    *("loss, own precision", "norm"),
)


_REJECTED_HEAD = ("why", "shrunk", "upstream", "configurations")


@dataclass(frozen=True)
class Measured:
    """How far a configuration is from DDP, as far as it is known.

    Attributes:
        fp32: Loss and norm.
        own: Loss and norm in its own precision.
    """

    fp32: tuple[str, ...] = ("", "")
    own: tuple[str, ...] = ("", "")


@dataclass
class Page:
    """What a run measured of every configuration.

    Attributes:
        upstream: All distinct configurations.
        shrunk: All that are left when they are small.
        others: Names of what other programs train.
        rejections: Why, by name.
        measured: By name.
    """

    upstream: Sequence[Configuration]
    shrunk: Sequence[Shrunk]
    others: Sequence[str]
    rejections: Mapping[str, str] = field(default_factory=dict)
    measured: dict[str, Measured] = field(default_factory=dict)

    def add(self, shrunk: Shrunk, difference: Difference, precision: str) -> None:
        """Take in a measured difference from DDP, in `fp32` or in the configuration's `own`."""
        known = self.measured.get(shrunk.name, Measured())
        numbers = (f"{difference.loss:.0e}", f"{difference.norm:.0e}")
        self.measured[shrunk.name] = dataclasses.replace(known, **{precision: numbers})

    def text(self) -> str:
        """The tables as Markdown."""
        lines = ["# Megatron-LM's own configurations", ""]
        lines += ["## How many", "", table(("", "number"), self._counts())]
        lines += ["", "## Rejected", "", table(_REJECTED_HEAD, self._rejected())]
        lines += ["", "## Trained beside DDP", "", *wrapped(_TRAINED), ""]
        lines += [table(_HEAD, self._trained())]
        lines += ["", "## Left out on a CPU", ""]
        lines += [table(("flag", "accepted configurations"), self._left_out())]
        lines += ["", "## Other programs", ""]
        lines += [f"* `{name}`" for name in self.others]
        return "\n".join(lines) + "\n"

    def _counts(self) -> Iterable[tuple[str, ...]]:
        accepted = self._accepted()
        known = [self.measured.get(each.name, Measured()) for each in accepted]
        done = [each.fp32 for each in known if each.fp32[0]]
        done_own = [each.own for each in known if each.own[0]]
        counts = {
            "configurations of GPT, MoE and hybrid models": _number_of(self.upstream),
            "of these with flags of their own": len(self.upstream),
            "of these still different when shrunk": len(self.shrunk),
            "rejected by name": len(self.shrunk) - len(accepted),
            "accepted": len(accepted),
            "trained in fp32, equal to DDP": len(done),
            "trained in their own precision, equal to DDP": len(done_own),
            "of these with losses that are bitwise equal": _bitwise(done_own),
            "largest difference of a loss, of a norm, in fp32": _largest(done),
            "in their own precision": _largest(done_own),
            "configurations of other programs": len(self.others),
        }
        return [(what, str(number)) for what, number in counts.items()]

    def _rejected(self) -> Iterable[tuple[str, ...]]:
        """Reasons, the most frequent first."""
        for_what: dict[str, list[Shrunk]] = {}
        for each in self.shrunk:
            if each.name in self.rejections:
                for_what.setdefault(self.rejections[each.name], []).append(each)
        for reason, found in sorted(for_what.items(), key=lambda item: (-len(item[1]), item[0])):
            upstream = sum(len(each.names) for each in found)
            names = ", ".join(f"`{each.name}`" for each in found)
            yield reason, str(len(found)), str(upstream), names

    def _left_out(self) -> Iterable[tuple[str, ...]]:
        counts = Counter(flag for each in self._accepted() for flag in left_out(each))
        for flag, number in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
            yield f"`{flag}`", str(number)

    def _trained(self) -> Iterable[tuple[str, ...]]:
        for each in self._accepted():
            known = self.measured.get(each.name, Measured())
            first = (f"`{each.name}`", str(len(each.names)), str(each.world_size))
            yield (*first, *known.fp32, *known.own)

    def _accepted(self) -> list[Shrunk]:
        return [each for each in self.shrunk if each.name not in self.rejections]


def _largest(cells: Sequence[tuple[str, ...]]) -> str:
    return ", ".join(max(column, key=float) for column in zip(*cells, strict=True)) or "-"


def _bitwise(cells: Sequence[tuple[str, ...]]) -> int:
    return sum(float(loss) == 0.0 for loss, _ in cells)


def _number_of(configurations: Sequence[Configuration]) -> int:
    return sum(len(each.names) for each in configurations)
