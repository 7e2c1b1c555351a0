"""What a user can ask of `KFAC` and `SPNGD` besides stepping."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from torch import Tensor
from torch.optim import Optimizer

from natgrad.checkpoint.optimizer_state import refuse_copy
from natgrad.diagnostics.probe import Probe
from natgrad.diagnostics.tables import refresh_summary, registration_table
from natgrad.engine.engine import Engine
from natgrad.requiring import require_count

if TYPE_CHECKING:
    from natgrad.plan import Choice


class Inspectable:
    """Everything that only asks the engine."""

    engine: Engine
    _handles: list[Any]

    def report(self) -> str:
        """A table of every parameter: its block, or why it is left out."""
        engine = self.engine
        groups = [] if engine.optimizer is None else engine.optimizer.param_groups
        return registration_table(engine.model, engine.statistics, groups)

    def __str__(self) -> str:
        return self.report()

    @property
    def choice(self) -> "Choice | None":
        """Of ``strategy="auto"``: what was chosen and why; None of any other."""
        return self.engine.auto.choice if self.engine.auto is not None else None

    @property
    def overhead(self) -> float | None:
        """Of ``strategy="auto"``: predicted seconds a step over SGD's, as a fraction.

        None until a few steps have shown what forward and backward take.
        """
        return self.engine.auto.overhead if self.engine.auto is not None else None

    def statistic(self, name: str) -> Tensor:
        """The current average of a statistic, dense: ``"fc/A"``, ``"bn1/unit"``..."""
        states = self.engine.statistics.states
        if name not in states:
            raise KeyError(
                f"Unknown statistic {name!r}. Must be one of {', '.join(states)}."
            )
        if states[name].average is None:
            raise RuntimeError(f"Statistic {name!r} is not kept on this rank now.")
        return self.engine.statistics.dense(states[name])

    def refreshes(self) -> dict[str, Any]:
        """Refreshes done and skipped by statistic, and the reduction rate.

        The rate is the bytes of statistics estimated over what refreshing everything
        at every step would have taken (SP-NGD, Table 2: smaller is better). ``last``
        names what the last step estimated and inverted. Under `Budget`, ``budget`` has
        what was spent and given up.
        """
        return refresh_summary(self.engine.statistics)

    def traffic(self) -> dict[str, Any]:
        """Bytes and calls by exchange, in the last step and in total."""
        return self.engine.comm.traffic()

    def watch(
        self, every: int = 10, sink: Callable[[dict[str, Any]], None] | None = None
    ) -> None:
        """Look at every block each ``every`` steps: `diagnostics` has the last look.

        Call it on all ranks, before training. Averages are then kept that
        ``decay=0`` would discard. ::

            kfac.watch(every=50, sink=natgrad.sinks.JsonlSink("diagnostics.jsonl"))

        Args:
            every: steps between two looks, >= 1; the first step is looked at.
            sink: a function of the record, called on rank 0 after each look, as
                `natgrad.sinks.JsonlSink` or `natgrad.sinks.TensorBoardSink`.
        """
        require_count("every", every)
        if self.engine.sharded:
            raise RuntimeError(
                "watch needs the whole weight on some rank. Must be for a model that "
                "is not sharded; report(), health() and traffic() work."
            )
        self.engine.probe = Probe(self.engine.statistics, every, self._shown, sink)

    def _shown(self) -> dict[str, float]:
        """What is found, and the learning rate, as the KL clip sees it.

        NaN if nothing has one.
        """
        tuner, optimizer = self.engine.tuner, getattr(self, "optimizer", self)
        found = {} if tuner is None else tuner.health()
        groups = optimizer.param_groups if isinstance(optimizer, Optimizer) else []
        return {**found, "lr": max((float(g["lr"]) for g in groups), default=math.nan)}

    def diagnostics(self) -> dict[str, Any]:
        """The last look at every block and statistic, equal on all ranks. See `watch`.

        ``blocks`` has for each: ``largest``, ``median`` and ``smallest`` eigenvalue,
        ``effective_rank`` and ``condition`` (damped); ``damping``, ``damping_ratio`` to
        the largest and ``above_damping``, the share of eigenvalues above it; ``age``
        and ``next`` refresh in steps, ``change`` at the last; ``norm_ratio`` and
        ``angle`` (degrees) between gradient and preconditioned gradient; ``kl``, lr^2
        times their product; ``motion``, the relative change of its weights since the
        last look; ``seconds`` and ``bytes`` with their shares. ``statistics`` has the
        same for each factor. With something ``"auto"`` there are also what `health` has
        of it. None is what is not known yet. Empty before the first look.
        """
        if self.engine.probe is None:
            raise RuntimeError(
                "Diagnostics are off. Call watch(every=...) before training."
            )
        return self.engine.probe.record

    def health(self) -> dict[str, Any]:
        """Steps skipped and estimates quarantined so far; inversions failed in a row.

        Counts by statistic are only of those that have one. ``grown`` has the layers
        whose weights run away: more than 100 times the norm that they began with, and
        how many times; of a sharded model, those that the last look found, which is
        taken every 100 steps. This reads from the device. With something ``"auto"``
        there are also ``damping``, the last ``ratio`` of true to predicted reduction,
        and the ``lr``, ``momentum`` and ``trust`` found last; NaN is what was not found
        yet.
        """
        engine, states = self.engine, self.engine.statistics.states.values()
        return {
            "skipped_steps": self.engine.skipped_steps,
            "quarantined": {
                s.spec.name: s.quarantined for s in states if s.quarantined
            },
            "failures": {s.spec.name: s.failures for s in states if s.failures},
            "grown": engine.references.grown(engine.blocks, engine.like)
            if not engine.sharded
            else dict(engine.references.last_grown),
            **({} if engine.tuner is None else engine.tuner.health()),
        }

    def set_loss_terms(self, terms: int, *, whole_step: bool = False) -> None:
        """Say over how many terms the coming loss is a mean, if that is not the batch.

        For example the number of tokens that are not masked. Holds for one step.

        Args:
            terms: how many, on this rank.
            whole_step: they are those of all the step's micro-batches and forwards
                together, whatever was divided by what: a Siamese network's pairs, or
                tokens summed over micro-batches. Call it before the first backward.
        """
        self.engine.capture.set_loss_terms(terms, whole_step)

    def ignore(self) -> AbstractContextManager[None]:
        """While open, no forward and no backward of the model counts. ::

            with optimizer.ignore():
                noise = torch.autograd.grad(probe(model), model.parameters())

        Only needed where the gradients that the step uses are themselves from
        `torch.autograd.grad`: beside a ``loss.backward()``, it is taken for a probe.
        """
        return self.engine.capture.ignoring()

    def sampled_backward(
        self,
        outputs: Tensor,
        likelihood: str = "cross_entropy",
        targets: Tensor | None = None,
    ) -> None:
        """Estimate statistics from labels drawn from the model (``fisher="sampled"``).

        Call it between the forward and ``loss.backward()``; ``.grad`` is not touched.
        It does nothing in steps in which no statistic is due. ::

            kfac.sampled_backward(outputs)
            criterion(outputs, labels).backward()

        Args:
            outputs: the model's outputs, with their graph.
            likelihood: ``"cross_entropy"`` (outputs are logits) or ``"mse"``.
            targets: labels to use instead of drawing them.
        """
        self.engine.sampled_backward(outputs, likelihood, targets)

    def gather(self) -> None:
        """Collective: put all statistics on every rank, until the next step.

        Call it on every rank before saving `state_dict` on one of them. Without it
        each rank's `state_dict` holds its own part, for the same number of ranks.
        """
        self.engine.gather()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        refuse_copy(type(self).__name__)

    def close(self) -> None:
        """Remove every hook from the model and the optimizer."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
