"""Everything that a step runs on: blocks, plan, hooks, statistics, communication."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from natgrad.capture.hooks import require_unwatched
from natgrad.capture.peers import ALONE
from natgrad.capture.recorder import Capture
from natgrad.checkpoint.gather import gather, part_of, release, warn_partial
from natgrad.checkpoint.state_dict import Kept, load, save
from natgrad.checkpoint.validate import require_state
from natgrad.diagnostics.probe import Probe
from natgrad.diagnostics.timer import Meter
from natgrad.distributed.communicator import Communicator, world_of
from natgrad.distributed.overlap import Outbox
from natgrad.distributed.replicate import make_alike
from natgrad.distributed.shards import find_shards
from natgrad.engine.planning import Planning
from natgrad.engine.replicas import Replicas
from natgrad.engine.shards import Shards, refuse_sharded
from natgrad.factors.statistics import Statistics
from natgrad.layers.block import statistics_like
from natgrad.layers.registration import Groups, parts_for, register
from natgrad.layers.unwrap import unwrap
from natgrad.math.tuning import tuning_of
from natgrad.options import Options
from natgrad.plan import Plan
from natgrad.quadratic.damping import Lambda
from natgrad.quadratic.tuner import Tuner
from natgrad.rules.lengths import References
from natgrad.rules.preconditioner import Preconditioner


class Machinery(ABC):
    """Blocks, plan, hooks, statistics and communication for one model.

    ``groups`` has the parts of the update by the ids of the parameters to train, if
    they are not all the same; ``optimizer`` the parameter groups.
    ``agrees_on_overflow``: see Note [Agreed overflow]. ``follows_ddp``: whether the
    model may be wrapped in DDP after this is made, which then averages gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        *,
        grad_scaler: torch.amp.GradScaler | None,
        groups: Groups | None = None,
        optimizer: Optimizer | None = None,
        agrees_on_overflow: bool = False,
        follows_ddp: bool = False,
    ) -> None:
        self.options, self.optimizer = options, optimizer
        self.skipped_steps = 0
        self.closed = self.gathered = self._warned = False
        self.probe: Probe | None = None
        self.tuner: Tuner | None = None
        self.before_replan: list[Callable[[], None]] = []
        self.calls: dict[str, int] = {}
        self._outbox: Outbox | None = None
        self._scaled = grad_scaler is not None and grad_scaler.is_enabled()
        ddp = self._register(model, groups)
        self.own_gradients = not (ddp or self.sharded) and world_of(options.group) > 1
        self._may_be_wrapped = follows_ddp and self.own_gradients
        if self.own_gradients and self._scaled and not agrees_on_overflow:
            raise ValueError(
                "A GradScaler skips steps on one rank alone unless gradients are "
                "averaged before it looks: wrap the model in DistributedDataParallel."
            )
        self._plan_and_connect("sharded" if self.sharded else "ddp" if ddp else "own")
        self._keep_statistics()
        self.capture = self._watch(grad_scaler)
        self._reopen()

    def _register(self, model: nn.Module, groups: Groups | None) -> bool:
        """Cut the model into blocks. Returns whether it is wrapped in DDP."""
        self.model, ddp = unwrap(model)
        self.blocks = register(self.model, self.options, groups)
        require_unwatched(self.blocks)
        self.block = {b.name: b for b in self.blocks}
        self.parts = {b.name: parts_for(b, self.options, groups) for b in self.blocks}
        self.sharding = find_shards(self.model, self.blocks, self.options.group)
        self.sharded = self.sharding is not None
        if self.sharded:
            refuse_sharded(self.options, self.parts)
        self.like = statistics_like(self.blocks)
        return ddp

    def _plan_and_connect(self, gradients: str) -> None:
        """Make the plan, compare it with the other ranks' and open its groups."""
        updates = list(dict.fromkeys(self.parts.values()))
        self._replicas = Replicas(self.model, self.options, updates, self.optimizer)
        self._planning = Planning(
            self.model,
            self.blocks,
            self.options,
            gradients=gradients,
            device=self.like.device,
        )
        self.auto = self._planning.auto
        self.plan = self._planning.plan()
        self.comm = self._connect(self.plan)
        if self.own_gradients:
            make_alike(self.model, self.comm)

    def _keep_statistics(self) -> None:
        """Make what is kept between steps: statistics, moments, lengths."""
        self.meter = Meter(self.like.device)
        self.statistics = Statistics(
            self.blocks,
            self.options,
            self.parts,
            plan=self.plan,
            comm=self.comm,
            like=self.like,
            meter=self.meter,
        )
        self.statistics.seconds = {} if self._planning.measures else None
        self.preconditioner = Preconditioner(self.statistics)
        self.moments = self.preconditioner.moments
        self.references = References()
        self.shards: Shards | None = None
        if self.sharded:
            self.shards = Shards(self.blocks, self.comm, self.like)
            if self.comm.world > 1:
                self.references.total = self.comm.agree

    def _watch(self, grad_scaler: torch.amp.GradScaler | None) -> Capture:
        return Capture(
            self.model,
            self.blocks,
            loss=self.options.loss,
            sampled=self.options.fisher == "sampled",
            subsample=self.options.subsample,
            world=self.comm.world,
            peers=self.sharding.peers if self.sharding else ALONE,
            precision=self.options.factor_precision,
            grad_scaler=grad_scaler,
            meter=self.meter,
            before_forward=self.before_forward,
        )

    def _connect(self, plan: Plan) -> Communicator:
        options, same = self.options, self._replicas.fingerprint()
        # ranks that choose by other sizes round otherwise
        same["tuning of the device"] = repr(tuning_of(self.like))
        return Communicator(plan, options.comm, options.group, fingerprint=same)

    def _reopen(self) -> None:
        """Send by the plan and in the present dtype; what was sent is void."""
        if self._outbox is not None:
            self._outbox.close()
        if self.comm.world > 1:
            blocks = self.blocks if self.own_gradients else None
            # a scaler writes to gradients after the backward: what left early is void
            early = not self._scaled
            self._outbox = Outbox(self.comm, self.like, blocks, early=early)
        self.arm()

    @abstractmethod
    def arm(self) -> None:
        """Tell capture what the coming step estimates, in which bases, and sends."""

    @abstractmethod
    def before_forward(self) -> None:
        """Follow a model that was converted or wrapped since the last forward."""

    @property
    def step(self) -> int:
        """Steps done so far."""
        return self.statistics.step

    def tune(self, options: Options, damping: Lambda | None) -> Tuner:
        """Have what is ``"auto"`` in the options that were given found.

        ``damping`` is what the engine's options have instead of an automatic one.
        """
        if self.sharded:
            raise ValueError(
                'Invalid "auto" for a sharded model: the quadratic model needs whole '
                "weights. Must be numbers."
            )
        if self._scaled:
            raise ValueError(
                "Invalid grad_scaler beside lr='auto', momentum='auto' or "
                "damping='auto': a GradScaler takes no closure. Must be None: train in "
                "bfloat16 or float32."
            )
        self.tuner = Tuner(self.model, self.statistics, self.capture, options, damping)
        return self.tuner

    def restart(self) -> None:
        """On all ranks: the passes since the last step do not count."""
        self._void()
        self.arm()

    def _void(self) -> None:
        """After a step that has failed, on all ranks: what of it was sent is void."""
        self.capture.take()
        if self._outbox is not None:
            self._outbox.settle()

    def gather(self) -> None:
        """Collective: put all statistics on every rank, until the next step."""
        gather(self.kept())
        self.gathered = True

    def _release(self) -> None:
        release(self.kept())
        self.gathered = False

    def _replan(self) -> None:
        """Once: give owners new statistics by the seconds that inversions took."""
        states, seconds = self.statistics.states, self.statistics.seconds or {}
        mine = self.like.new_tensor([seconds.get(name, 0.0) for name in states])
        total: list[float] = self.comm.agree(mine).tolist()
        if not any(total):
            return
        self.gather()
        for prepare in self.before_replan:
            prepare()
        self._follow(self._planning.plan_by(dict(zip(states, total, strict=True))))
        self._release()

    def _follow(self, plan: Plan) -> None:
        """Collective, between steps: go on under another plan."""
        self.plan, moved = plan, self.comm.moved
        self.comm.close()
        self.comm = self._connect(plan)
        self.comm.moved = moved
        self.statistics.plan, self.statistics.comm = plan, self.comm
        if not self._planning.measures:
            self.statistics.seconds = None
        self._reopen()

    def state_dict(self, *, warn: bool = True) -> dict[str, Any]:
        """Statistics, inverses and timing, as tensors and numbers.

        After `gather` all of them; else only this rank's part, and once a warning.
        """
        whole = self.gathered or self.comm.world == 1
        part = None if whole else part_of(self.plan, self.comm)
        if part and warn and self.step and not self._warned:
            self._warned = warn_partial(self.comm)
        seconds, calls = dict(self._planning.seconds), dict(self.calls)
        return {**self._saved(), "part": part, "calls": calls, "seconds": seconds}

    def kept(self) -> Kept:
        """What this rank keeps now."""
        return Kept(
            statistics=self.statistics,
            moments=self.moments,
            references=self.references,
            gathered=self.gathered,
        )

    def _saved(self) -> dict[str, Any]:
        tuner = None if self.tuner is None else self.tuner.state_dict()
        counts = {"quadratic": tuner, "skipped_steps": self.skipped_steps}
        return {**save(self.kept()), **counts}

    def _load(self, state: dict[str, Any]) -> None:
        load(self.kept(), state)
        # older states do not say
        self.skipped_steps = int(state.get("skipped_steps", 0))
        if self.tuner is not None and state.get("quadratic"):
            self.tuner.load_state_dict(state["quadratic"])

    def convert(self, like: Tensor) -> None:
        """Take all that is kept to the dtype and device that the parameters have now.

        They have changed by ``model.double()`` or ``model.to(...)``, say.
        """
        to = f"{like.dtype}, {like.device.type}"
        self.comm.meet(f"model.to({to}) in step {self.step}")
        state = self._saved()
        self.like = self.statistics.like = like
        self._load(state)
        self._reopen()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`: a whole one, or this rank's part.

        A part whose owners were measured is collective, as they are taken over.
        """
        seconds = self._planning.saved_seconds(state, self.statistics.states)
        if self.step == 0 and seconds is not None:
            self._follow(self._planning.plan_by(seconds))
        require_state(state, self.statistics, part_of(self.plan, self.comm))
        self._load(state)
        self.calls = dict(state["calls"])
        self._release()
        self.capture.take()
        self.arm()

    def close(self) -> None:
        """Remove every hook and stop communicating."""
        self.capture.close()
        self.comm.close()
        if self.auto is not None:
            self.auto.close()
        if self._outbox is not None:
            self._outbox.close()
        self.closed = True

    @contextmanager
    def closing_on_error(self) -> Generator[None]:
        """Leave no hook behind if the rest of a constructor raises."""
        try:
            yield
        except BaseException:
            self.close()
            raise
