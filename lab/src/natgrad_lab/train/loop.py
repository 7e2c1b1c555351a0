"""The training loop: one object, one step that reads top to bottom."""

import math
import signal
import warnings
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from natgrad_lab import data, models
from natgrad_lab.data import Dataset
from natgrad_lab.data.follow import followed
from natgrad_lab.errors import UserError
from natgrad_lab.train import snapshot
from natgrad_lab.train.checkpoint import Checkpoints
from natgrad_lab.train.feed import Feed
from natgrad_lab.train.methods import make
from natgrad_lab.train.metrics import Clock, MetricsWriter, waiting_share
from natgrad_lab.train.objective import Classes, Objective, Values
from natgrad_lab.train.precision import Mixed
from natgrad_lab.train.processes import World, is_connection
from natgrad_lab.train.progress import Bar
from natgrad_lab.train.refreshes import RefreshLog
from natgrad_lab.train.run import Run, note_data
from natgrad_lab.train.schedules import make_scheduler
from natgrad_lab.train.signals import StopRequest, stop_request
from natgrad_lab.train.tree import Rows


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a run ended, and after which step.

    ``reason`` is "done", "unsaved" (done, but the last checkpoint could not be
    written), "interrupted" or "diverged". ``by`` is the signal that interrupted it.
    """

    reason: str
    step: int
    by: int = 0


class Trainer:
    """Everything one process needs to train.

    Args:
        run: folder and settings.
        world: this process among its peers.
        title: what the progress bar says.
        show: whether progress is shown at all (on rank 0).
    """

    def __init__(
        self, run: Run, world: World, *, title: str | None = None, show: bool = True
    ) -> None:
        self.run, self.world, self.config = run, world, run.config
        self.title = title or self.config.optimizer.label
        self._show = show and world.main
        if self.config.threads is not None:
            torch.set_num_threads(self.config.threads)
        self.micro, self.forwards = self.config.accumulation(world.size)
        dataset = self._load_data()
        self._data_note = dataset.note
        self.objective: Objective = Classes(self.config.data.label_smoothing)
        if dataset.values:
            self.objective = Values(dataset.values)
        torch.manual_seed(self.config.seed)
        self.model, layout = self._build_model(dataset)
        self.feed = Feed(
            dataset,
            self.config,
            world,
            micro=self.micro,
            channels_last=layout == torch.channels_last,
        )
        # SPNGD averages gradients itself; the others see DDP's averages.
        alone = self.config.optimizer.alone
        self.replica = self.model if alone else world.data_parallel(self.model)
        self.mixed = Mixed(self.config.precision, world.device)
        self.method = make(
            self.replica,
            self.config,
            examples=self.feed.examples,
            grad_scaler=self.mixed.scaler,
        )
        # Weights start equal; what is drawn from here on (dropout, sampled labels)
        # must differ from rank to rank.
        torch.manual_seed(self.config.seed * 100_003 + world.rank)
        optimizer = self.method.optimizer
        self.scheduler = make_scheduler(optimizer, self.config, self.feed.examples)
        self.total = self.config.total_steps(self.feed.examples)
        self.step = 0
        self.clock = Clock.of(world.device)
        # since the last record: the sum of finite losses, and how many there were
        self._loss = torch.zeros(2, device=world.device)
        self._metrics: MetricsWriter | None = None
        self.checkpoints = Checkpoints(run.checkpoints, world)
        self._saved = True
        self._refreshes = RefreshLog(self.method.curved)
        if self.config.diagnostics and self.method.curved is not None:
            self.method.curved.watch(self.config.diagnostics, self._look)

    def train(self, *, resume: bool = False) -> Ending:
        """Run to the end, or until a signal or a non-finite loss."""
        if resume and self.checkpoints.any():
            self._restore()
        bar = Bar(self.title, self.total, done=self.step, show=self._show)
        with self._writing(), stop_request() as request, bar:
            if resume:
                self._write("resume", epoch=self.epoch)
            with self._telling():
                ending = self._steps(request, bar)
            self._report_save(self.checkpoints.wait())
            if ending.reason == "done" and not self._saved:
                ending = Ending(reason="unsaved", step=self.step)
            self._write("end", reason=ending.reason, **self._spent())
        self.close()
        return ending

    def close(self) -> None:
        """Remove hooks, stop the loaders and finish what is being saved."""
        self.method.close()
        self.feed.close()
        self.checkpoints.close()

    @property
    def epoch(self) -> float:
        """Passes over the data so far."""
        return self.config.epoch(self.step, self.feed.examples)

    def _steps(self, request: StopRequest, bar: Bar) -> Ending:
        while self.step < self.total:
            try:
                self._one_step()
            except RuntimeError as error:
                # Some optimizers raise on what is not finite, before it is logged.
                if self._last.isfinite() or is_connection(error):
                    raise
                return Ending(reason="diverged", step=self.step)
            bar.advance(self.step)
            if self._due_every_steps(self.config.log_every) and not self._log():
                return Ending(reason="diverged", step=self.step)
            if self._due(self.config.evaluate_every) and not self._evaluate(bar):
                return Ending(reason="diverged", step=self.step)
            stop = self.world.any(request.asked)
            if stop or self._due(self.config.checkpoint_every):
                self._save()
            if stop and self.step < self.total:
                # one answer on all ranks, of which perhaps only one got a signal
                ended = self.world.any(request.number == signal.SIGTERM)
                by = signal.SIGTERM if ended else signal.SIGINT
                return Ending(reason="interrupted", step=self.step, by=by)
        return Ending(reason="done", step=self.step)

    def _one_step(self) -> None:
        self.replica.train()
        self._last = torch.zeros((), device=self.world.device)
        if self.method.finds:
            return self._found_step()
        for index in range(self.forwards):
            self.world.mark(f"in step {self.step}, data")
            with self.clock.phase("data"):
                inputs, labels = self.feed.next()
            with self._reduction(last=index == self.forwards - 1):
                self.world.mark(f"in step {self.step}, forward and backward")
                with self.clock.phase("forward"):
                    outputs, loss = self._closure(inputs, labels)
                    loss = loss / self.forwards
                with self.clock.phase("backward"):
                    self.method.before_backward(outputs)
                    self.mixed.backward(loss)
            self._last += loss.detach()
        self._note_loss()
        self.world.mark(f"in step {self.step}, update")
        with self.clock.phase("update"):
            self.mixed.step(self.method.optimizer)
            self._refreshes.note(self.step + 1)
            self.scheduler.step()
            self.method.optimizer.zero_grad()
        self.step += 1

    def _found_step(self) -> None:
        """With closures: the optimizer runs forwards and backwards, and finds rates."""
        closures: list[Any] = []
        with self.clock.phase("data"):
            for _ in range(self.forwards):
                closures.append(partial(self._closure, *self.feed.next()))
        self.world.mark(f"in step {self.step}, update")
        with self.clock.phase("update"):
            self._last += self.method.optimizer.step(closures)  # type: ignore[operator]
            self._refreshes.note(self.step + 1)
        self._note_loss()
        self.step += 1

    def _closure(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        with self.mixed.autocast():
            outputs = self.replica(inputs)
        outputs = outputs.float()
        return outputs, self.objective.loss(outputs, labels)

    def _note_loss(self) -> None:
        """A loss that is not finite is not summed: one bad batch is a skipped step."""
        finite = self._last.isfinite()
        self._loss[0] += torch.where(finite, self._last, 0.0)
        self._loss[1] += finite

    def _reduction(self, *, last: bool) -> AbstractContextManager[Any]:
        """DDP averages gradients in the last backward of an accumulation only."""
        if isinstance(self.replica, DistributedDataParallel) and not last:
            return self.replica.no_sync()
        return nullcontext()

    def _evaluate(self, bar: Bar) -> bool:
        """Write a test record; False when its loss is not finite, nor the weights."""
        with self.world.average_buffers(self.model):
            loss, accuracy = self._test()
        seen = {"loss": loss, "accuracy": accuracy}
        self._write("test", epoch=self.epoch, **seen, **self._spent())
        seen |= {"seconds": self.clock.total, **self.method.found()}
        bar.say(self.step, self.epoch, **seen)
        return math.isfinite(loss)

    @torch.no_grad()
    def _test(self) -> tuple[float, float]:
        """Mean loss and accuracy in percent over the whole test set."""
        self.model.eval()
        totals = torch.zeros(self.objective.size, dtype=torch.float64)
        for inputs, labels in self.feed.test():
            with self.mixed.autocast():
                outputs = self.model(inputs)
            totals = totals + self.objective.totals(outputs.float(), labels)
        return self.objective.result(self.world.sum(totals))

    def _log(self) -> bool:
        """Write a training record; False when no loss since the last was finite."""
        total, finite = self.world.sum(self._loss.double().cpu()).tolist()
        self._loss.zero_()
        loss = total / finite if finite else math.nan
        phases = self.clock.take()
        self._write(
            "train",
            epoch=self.epoch,
            loss=loss,
            **self.method.facts(self.step - 1),
            **self.mixed.facts(),
            **self._refreshes.take(),
            **self._spent(),
            phases=phases,
            waiting=waiting_share(phases),
        )
        return math.isfinite(loss)

    def _spent(self) -> dict[str, float]:
        return {"seconds": self.clock.total, "cpu_seconds": self.clock.cpu}

    def _due(self, every: float) -> bool:
        """Whether the last step crossed a multiple of ``every`` epochs, or ended."""
        if self.step == self.total:
            return True
        if every == 0:
            return False
        before = self.config.epoch(self.step - 1, self.feed.examples)
        return math.floor(self.epoch / every) > math.floor(before / every)

    def _due_every_steps(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.total

    def _save(self) -> None:
        state = {
            **snapshot.model_state(self.model),
            "optimizer": snapshot.optimizer_state(self.method.optimizer, self.model),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.mixed.state_dict(),
            "feed": self.feed.state_dict(),
            "random": snapshot.random_state(),
            **self._spent(),
            "loss": Rows(self._loss[None]),
        }
        self._report_save(self.checkpoints.save(self.step, state))

    def _report_save(self, problem: str) -> None:
        """A save that failed is told, and training goes on."""
        self._saved = not problem
        if problem:
            self._write("unsaved", problem=problem)
            if self.world.main:
                warnings.warn(f"Checkpoint: {problem}.", stacklevel=2)

    def _restore(self) -> None:
        """Go on from the newest checkpoint that fits."""
        self.checkpoints.load(snapshot.wanted_by(self.method.curved), self._use)

    def _use(self, state: dict[str, Any], ranks: int) -> None:
        self.step = state["step"]
        rank, same = self.world.rank, ranks == self.world.size
        snapshot.load_model(self.model, state, rank, same)
        snapshot.load_optimizer(self.method.optimizer, self.model, state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.mixed.load_state_dict(state.get("scaler", {}))
        self.feed.load_state_dict(state["feed"])
        seed, step = self.config.seed, self.step
        snapshot.load_random(
            state["random"], self.world, same=same, seed=seed, step=step
        )
        self.clock.total, self.clock.cpu = state["seconds"], state["cpu_seconds"]
        self._loss.copy_(snapshot.row_of(state["loss"], rank, same))

    def _load_data(self) -> Dataset:
        asked = self.config.data
        with followed("images") as seen:
            progress = seen if self._show else None
            return data.load(
                asked.name,
                asked.root,
                ranks=self.world,
                progress=progress,
                **asked.options,
            )

    def _build_model(self, dataset: Dataset) -> tuple[nn.Module, torch.memory_format]:
        settings = self.config.model
        options = {} if settings.width is None else {"width": settings.width}
        classes = len(dataset.classes) or dataset.values
        try:
            model = models.build_for(settings.name, dataset.shape, classes, **options)
        except TypeError as error:
            if options and "'width'" in str(error):
                why = f"Must be none: {settings.name} has no width."
                raise UserError(
                    f"Invalid model.width={settings.width}. {why}"
                ) from None
            what = f"model {settings.name} on {dataset.name}"
            raise UserError(f"Cannot build {what}: {error}") from error
        if isinstance(model, models.Airbench):
            model.fit(dataset.normalised(range(min(5000, len(dataset.train)))))
        if settings.norm_deviation:
            models.spread_norms_(model, settings.norm_deviation)
        layout = models.fastest_layout(model)
        if settings.channels_last is not None:
            last = settings.channels_last
            layout = torch.channels_last if last else torch.contiguous_format
        model = model.to(self.world.device)
        return model.to(memory_format=layout), layout  # type: ignore[call-overload]

    @contextmanager
    def _telling(self) -> Generator[None]:
        """What fails here alone is told to the ranks that will wait for this one."""
        try:
            yield
        except Exception as error:
            if self.method.curved is not None and not is_connection(error):
                self.method.curved.engine.comm.fail(error)
            raise

    @contextmanager
    def _writing(self) -> Generator[None]:
        if self.world.main:
            note_data(self.run, self._data_note)
            board = self.config.tensorboard
            self._metrics = MetricsWriter(self.run.folder, tensorboard=board)
        try:
            yield
        finally:
            if self._metrics is not None:
                self._metrics.close()

    def _look(self, record: dict[str, Any]) -> None:
        if self._metrics is not None:
            self._metrics.look(record)

    def _write(self, kind: str, **values: Any) -> None:
        if self._metrics is not None:
            self._metrics.write(kind, self.step, **values)
