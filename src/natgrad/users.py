"""What a user can ask of `KFAC` and `SPNGD` besides stepping."""

from types import TracebackType
from typing import Any, Self

from torch import Tensor

from natgrad.engine import Engine
from natgrad.report import refresh_summary, registration_table


class Inspectable:
    """Everything that only asks the engine."""

    engine: Engine

    def report(self) -> str:
        """A table of every parameter: its block, or why it is left out."""
        return registration_table(self.engine)

    def __str__(self) -> str:
        return self.report()

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
        at every step would have taken (SP-NGD, Table 2: smaller is better).
        """
        return refresh_summary(self.engine)

    def traffic(self) -> dict[str, Any]:
        """Bytes and calls by exchange, in the last step and in total."""
        return self.engine.comm.traffic()

    def health(self) -> dict[str, Any]:
        """Steps skipped and estimates quarantined so far; inversions failed in a row.

        Counts by statistic are only of those that have one.
        """
        states = self.engine.statistics.states.values()
        return {
            "skipped_steps": self.engine.skipped_steps,
            "quarantined": {
                s.spec.name: s.quarantined for s in states if s.quarantined
            },
            "failures": {s.spec.name: s.failures for s in states if s.failures},
        }

    def set_loss_terms(self, terms: int) -> None:
        """Say over how many terms the coming loss is a mean, if that is not the batch.

        For example the number of tokens that are not masked. Holds for one step.
        """
        self.engine.capture.set_loss_terms(terms)

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

    def state_dict(self) -> dict[str, Any]:
        """Statistics, inverses and timing, as tensors and numbers."""
        return self.engine.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict` of the same model and options."""
        self.engine.load_state_dict(state)

    def close(self) -> None:
        """Remove every hook."""
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
