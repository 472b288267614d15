"""Bytes by role and unit as they come and go: what lives, what was the most, and when."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

__all__ = ["Account", "Ledger", "Moment", "Role"]


class Role(enum.Enum):
    """What memory is for."""

    MAIN_WEIGHT = "main weight"
    """What the optimizer steps."""
    MODEL_WEIGHT = "model weight"
    """What the forward computes with, where it has storage of its own."""
    MAIN_GRAD = "main gradient"
    """What the optimizer reads."""
    OPTIMIZER = "optimizer"
    """State, and what a step of the optimizer makes in between."""
    OTHER = "other"
    """Parameters and buffers of the model that are not sharded."""
    GATHERED = "gathered"
    """Whole weights of units that compute, or soon will."""
    GRAD_BUFFER = "gradient buffer"
    """Whole gradients on their way to be reduced, and shards between two axes of a mesh."""
    COMMUNICATION = "communication"
    """Copies in the communication dtype, and what a reduction receives on a CPU."""
    POOL = "idle in the pool"
    """What the trace pool holds for buffers that do not live now."""
    ACTIVATIONS = "activations"
    """Everything that is made outside of sharding and optimizer."""


@dataclass(frozen=True, slots=True)
class Account:
    """Where bytes are booked.

    Attributes:
        role: What they are for.
        unit: Name of the unit; empty for the root and for what belongs to none.
    """

    role: Role
    unit: str


@dataclass(frozen=True, slots=True)
class Moment:
    """What lives at one moment.

    Attributes:
        phase: What was going on, such as `backward`.
        unit: Of which unit; empty for the root.
        accounts: Bytes by role and unit.
    """

    phase: str
    unit: str
    accounts: Mapping[Account, int]

    @property
    def total(self) -> int:
        """Bytes in all."""
        return sum(self.accounts.values())

    def of_role(self, role: Role) -> int:
        """Bytes of a role."""
        return sum(n for account, n in self.accounts.items() if account.role is role)

    def of_unit(self, unit: str) -> dict[Role, int]:
        """Bytes of a unit by role."""
        return {a.role: n for a, n in self.accounts.items() if a.unit == unit and n}


class _Highest:
    """The moment with the most bytes; copied when it ends and not while bytes still grow."""

    def __init__(self) -> None:
        self.total = 0
        self.moment: Moment | None = None
        self._is_now = False

    def rise(self, total: int) -> None:
        if total > self.total:
            self.total, self._is_now = total, True

    def settle(self, phase: str, unit: str, accounts: Mapping[Account, int]) -> None:
        if self._is_now:
            self.moment = Moment(phase, unit, {a: n for a, n in accounts.items() if n})
            self._is_now = False


class Ledger:
    """Books bytes.

    Attributes:
        live: Bytes that live now, by role and unit.
        total: Their sum.
        role_peaks: The most bytes of each role, at whatever moment.
        unit_peaks: The most bytes of each unit, at whatever moment.
    """

    def __init__(self) -> None:
        self.live: Counter[Account] = Counter()
        self.total = 0
        self.role_peaks: dict[Role, int] = dict.fromkeys(Role, 0)
        self.unit_peaks: Counter[str] = Counter()
        self._of_role: Counter[Role] = Counter()
        self._of_unit: Counter[str] = Counter()
        self._now = ("start", "")
        self._highest = _Highest()
        self._interval = _Highest()
        self._intervals: list[Moment] = []

    def add(self, account: Account, nbytes: int) -> None:
        """Bytes came to life."""
        self._change(account, nbytes)
        role, unit = account.role, account.unit
        self.role_peaks[role] = max(self.role_peaks[role], self._of_role[role])
        self.unit_peaks[unit] = max(self.unit_peaks[unit], self._of_unit[unit])
        self._highest.rise(self.total)
        self._interval.rise(self.total)

    def remove(self, account: Account, nbytes: int) -> None:
        """Bytes are free again."""
        self._settle()
        self._change(account, -nbytes)

    def enter(self, phase: str, unit: str) -> None:
        """Something else goes on from here."""
        if self._now == (phase, unit):
            return
        self._close_interval()
        self._now = (phase, unit)
        self._interval.rise(self.total)

    @property
    def peak(self) -> Moment:
        """The moment when most bytes lived."""
        self._settle()
        return self._highest.moment or Moment(*self._now, {})

    def intervals(self) -> Iterator[Moment]:
        """The highest moment of each phase of each unit, in the order of time, by role alone."""
        self._settle()
        yield from self._intervals
        if self._interval.moment is not None:
            yield self._interval.moment

    def _change(self, account: Account, nbytes: int) -> None:
        self.live[account] += nbytes
        self._of_role[account.role] += nbytes
        self._of_unit[account.unit] += nbytes
        self.total += nbytes

    def _settle(self) -> None:
        self._highest.settle(*self._now, self.live)
        # Of every interval, by role alone: there are many.
        by_role = {Account(role, ""): n for role, n in self._of_role.items()}
        self._interval.settle(*self._now, by_role)

    def _close_interval(self) -> None:
        self._settle()
        if self._interval.moment is not None:
            self._intervals.append(self._interval.moment)
        self._interval = _Highest()
