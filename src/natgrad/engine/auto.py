"""``strategy="auto"``: the fastest strategy on this machine, and what it will cost.

Rank 0 looks for a profile, compares the strategies by `choose_strategy` and tells the
other ranks. The profile is the first of: the ``profile`` argument, the file that
``$NATGRAD_PROFILE`` names, the file that ``natgrad calibrate`` writes by default, and
built-in numbers of no particular machine, which it says.

What a forward and a backward take is not known when it chooses: strategies within 5% of
each other in the seconds that they add to those are one to it.

What compares and predicts is imported when it is asked for, which is seldom: every
optimizer's import has this module in it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from natgrad.distributed.communicator import rank_of, tell, world_of
from natgrad.options import Options, Profile
from natgrad.plan.plan import Plan

if TYPE_CHECKING:
    from natgrad.plan.autotune.choice import Choice
    from natgrad.plan.autotune.profile import HardwareProfile

AUTO = "auto"

# not with |, which takes no name of what is yet to be imported


def decided_by_first(make: Callable[[], Choice], group: Any) -> Choice:
    """Collective: what ``make()`` returns, or raises, on rank 0, on all ranks."""
    if world_of(group) == 1:
        return make()
    made: Choice | Exception | None = None
    if rank_of(group) == 0:
        try:
            made = make()
        except Exception as error:
            made = error
    told = tell(f"strategy={AUTO!r}", made, group)[0]
    if isinstance(told, Exception):
        raise told
    return told


def say(text: str) -> None:
    """Print to stderr."""
    print(text, file=sys.stderr, flush=True)


def find_machine(
    profile: Profile | None, device: torch.device, world: int
) -> tuple[HardwareProfile, str]:
    """The profile to use, and where it is from."""
    from natgrad.plan.autotune.profile import HardwareProfile, built_in
    from natgrad.plan.autotune.profile_file import find_calibrated, load_profile

    if isinstance(profile, HardwareProfile):
        return profile, f"{profile.name!r}, as given"
    if profile is not None:
        return load_profile(profile), str(profile)
    if found := find_calibrated():
        return found
    return built_in(device, world), (
        f"built-in numbers for {device.type}, not of this machine: "
        "`natgrad calibrate` measures it"
    )


class Automatic:
    """A choice on all ranks, and its overhead over SGD once passes were timed.

    Construction is collective; rank 0 prints, on stderr. `make_plan` is the given one,
    a partial of `natgrad.plan.make_plan`, with the strategy that was chosen.

    Steps that estimate statistics take longer by the time that takes. Passes are from
    the start of a step's first forward to `stop`, which the curvature's step calls.
    """

    WARM_UP, ENOUGH, LAST = 2, 3, 200

    def __init__(
        self,
        make_plan: partial[Plan],
        model: nn.Module,
        options: Options,
        device: torch.device,
    ) -> None:
        self._given, self._options, self._device = make_plan, options, device
        self._profile, self._group = options.profile, options.group
        self._main = rank_of(self._group) == 0
        self._interval = options.refresh.mean_intervals()[0]
        self._gradients: str = make_plan.keywords["gradients"]
        self.choice = decided_by_first(self._choose, self._group)
        self.overhead: float | None = None
        self._spent: dict[bool, list[float]] = {True: [], False: []}
        self._steps = 0
        self._began: float | None = None
        self._handle = model.register_forward_pre_hook(self._start)

    def make_plan(self, **changes: Any) -> Plan:
        """The plan of the strategy chosen; collective if ``gradients`` have changed.

        Who averages gradients decides what a strategy costs, so that a model that DDP
        wraps after all is chosen for again.
        """
        gradients = changes.get("gradients", self._gradients)
        if gradients != self._gradients:
            self._gradients = gradients
            self.choice = decided_by_first(self._choose, self._group)
        found = {"strategy": self.choice.strategy, "costs": self.choice.cost}
        return self._given(**{"gradients": self._gradients, **found, **changes})

    def _choose(self) -> Choice:
        from natgrad.plan.autotune.choice import choose_strategy

        given = self._given.keywords
        machine, where = find_machine(self._profile, self._device, given["world"])
        statistics, inverses = self._options.refresh.mean_intervals()
        choice = choose_strategy(
            self._given.args[0],
            given["world"],
            machine,
            statistics=statistics,
            inverses=inverses,
            inverse=given["inverse"],
            scale=self._options.rule.name,
            gradients=self._gradients,
            placement=given["placement"],
        )
        say(f"natgrad: profile {where}\nnatgrad: strategy {choice.reasons}")
        return choice

    def _start(self, module: nn.Module, _: Any) -> None:
        if self._began is None and module.training and torch.is_grad_enabled():
            self._began = self._now()

    def stop(self, *, due: bool) -> None:
        """A step's passes are over; ``due``: they estimated statistics."""
        if self._began is None:
            return
        spent, self._began = self._now() - self._began, None
        self._steps += 1
        if self._steps > self.WARM_UP:
            self._spent[due].append(spent)
        plain = self.ENOUGH if self._interval > 1 else 0
        enough = len(self._spent[True]) >= self.ENOUGH
        if (enough and len(self._spent[False]) >= plain) or self._steps >= self.LAST:
            self._tell()

    def _tell(self) -> None:
        self.close()
        plain, due = self._spent[False], self._spent[True]
        if not (plain or due):
            return
        from statistics import median  # slow to import, and few runs come here

        passes = median(plain or due)
        estimate = max(0.0, median(due) - passes) if plain and due else 0.0
        # DDP's exchange is under the backward that was timed; ours comes on top.
        own = self._gradients == "own"
        step = passes + (self.choice.sgd if own else 0.0)
        self.overhead = (self.choice.added + estimate / self._interval) / step
        if self._main:
            beside = "" if plain else ", beside statistics, estimated in every step"
            say(
                f"natgrad: forward and backward take {1e3 * passes:.3g} ms, statistics "
                f"{1e3 * estimate:.3g} ms; predicted overhead over SGD of "
                f"{self.choice.strategy}: {100 * self.overhead:+.1f}%{beside}"
            )

    def close(self) -> None:
        """Stop timing."""
        self._handle.remove()
        self._began = None

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
