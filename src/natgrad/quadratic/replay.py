"""A closure that is run again as it was, at other weights or along directions.

Note [Forward mode]
Products with the Jacobian of a model come from forward-mode differentiation of the
closure itself: the weights are replaced by dual numbers, and whatever it computes
carries their tangents along. Nothing else may be left of it: buffers are replaced by
copies, so that batch normalisation counts no batch; random numbers are drawn from the
state that the first run began with, so that dropout repeats its mask; natgrad's hooks
do not listen; a compiled model runs as it was written. Attention takes torch's plain
kernel, and recurrent layers one without oneDNN, as the others have no forward mode.
All directions go in one pass, by `torch.vmap` of `torch.func.jvp`. That knows fewer
models (no batch normalisation in training): others have a pass for each direction.
"""

import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

from natgrad.quadratic.part import Part

Closure = Callable[[], tuple[Any, Tensor]]
Weights = Mapping[str, Tensor]


class Run:
    """What the first run of a closure gave, and the random state it began with.

    Attributes:
        outputs: the tensors among its outputs, with their graph.
        loss: a number, with its graph.
        share: what its loss is multiplied by, to make that of a step.
        draws: whether it has drawn random numbers.
    """

    def __init__(
        self, closure: Closure, devices: Sequence[torch.device], share: float = 1.0
    ) -> None:
        self.closure, self.share = closure, share
        self._devices = [d for d in devices if d.type == "cuda"]
        self._random = torch.get_rng_state()
        self._cuda = [torch.cuda.get_rng_state(d) for d in self._devices]
        with torch.enable_grad():
            self.outputs, self.loss = taken_apart(closure())
        same = torch.equal(self._random, torch.get_rng_state())
        pairs = zip(self._devices, self._cuda, strict=True)
        same = same and all(
            torch.equal(torch.cuda.get_rng_state(d), s) for d, s in pairs
        )
        self.draws = not same

    @contextmanager
    def same_random(self) -> Generator[None]:
        """Random numbers are those of the first run; later ones stay as they are."""
        with torch.random.fork_rng([d.index or 0 for d in self._devices]):
            torch.set_rng_state(self._random)
            for device, state in zip(self._devices, self._cuda, strict=True):
                torch.cuda.set_rng_state(state, device)
            yield


def taken_apart(returned: Any) -> tuple[list[Tensor], Tensor]:
    """The outputs and the loss that a closure has returned; raises if it has not."""
    pair = isinstance(returned, tuple) and len(returned) == 2  # pyright: ignore[reportUnknownArgumentType]
    loss: Any = returned[1] if pair else None
    if not (isinstance(loss, Tensor) and loss.numel() == 1):
        kind = type(returned).__name__  # pyright: ignore[reportUnknownArgumentType]
        raise TypeError(
            f"Invalid closure: it returned a {kind}. Must return (outputs, loss) with "
            "a loss of one element, and must not call backward: natgrad does."
        )
    leaves = tree_leaves(returned[0])
    outputs = [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]
    return outputs, loss


class Replay:
    """Runs closures of a model again. See Note [Forward mode].

    Args:
        model: the plain module, whose parameters are replaced.
        silence: opens a context in which nothing listens to the model.
        part: of the examples, that tangents are computed for: the first.
    """

    def __init__(
        self,
        model: nn.Module,
        silence: Callable[[], AbstractContextManager[None]],
        part: float = 1.0,
    ) -> None:
        self._caller, self._silence = _Caller(model), silence
        self._model, self._part = model, Part(model, part)
        self._recurrent = any(isinstance(m, nn.RNNBase) for m in model.modules())
        self._together = True

    def loss(self, run: Run, weights: Weights) -> Tensor:
        """The loss at these weights."""
        with self._as_it_was(run):
            return taken_apart(self._called(run, weights))[1].detach()

    def tangents(
        self, run: Run, weights: Weights, directions: Sequence[Weights]
    ) -> list[list[Tensor]]:
        """For each direction, of weights by name, the derivative of each output.

        Of part of the batch they are scaled: see Note [Part of a batch].
        """
        self._part.require_repeatable(draws=run.draws)
        with self._part.cut():
            found = self._tangents(run, weights, directions)
        return [self._part.scaled(x) for x in found]

    def _tangents(
        self, run: Run, weights: Weights, directions: Sequence[Weights]
    ) -> list[list[Tensor]]:
        if self._together and len(directions) > 1:
            stacked = {
                n: torch.stack([d[n] for d in directions]) for n in directions[0]
            }
            try:
                found = self._pushed_together(run, weights, stacked)
                return [[x[i] for x in found] for i in range(len(directions))]
            except Exception:
                self._together = False  # what is wrong, if anything, is said below
        try:
            return [[*self._pushed(run, weights, d)] for d in directions]
        except Exception as error:
            if _is_missing(error):
                raise self._named(run, weights, directions[0], error) from error
            raise

    def _pushed_together(
        self, run: Run, weights: Weights, stacked: Weights
    ) -> tuple[Tensor, ...]:
        """Tangents of each output, the directions in their first dim."""
        own = {name: weights[name].detach() for name in stacked}
        rest = {n: w.detach() for n, w in weights.items() if n not in stacked}

        def outputs(moved: Weights) -> tuple[Tensor, ...]:
            return (*taken_apart(self._called(run, {**rest, **moved}))[0],)

        def push(direction: Weights) -> tuple[Tensor, ...]:
            return torch.func.jvp(outputs, (own,), (direction,))[1]

        with self._as_it_was(run):
            return torch.vmap(push, randomness="same")(stacked)

    def _pushed(
        self, run: Run, weights: Weights, direction: Weights
    ) -> tuple[Tensor, ...]:
        with self._as_it_was(run), forward_ad.dual_level():
            duals = {
                name: forward_ad.make_dual(w.detach(), direction[name])
                if name in direction
                else w.detach()
                for name, w in weights.items()
            }
            outputs, _ = taken_apart(self._called(run, duals))
            pairs = [forward_ad.unpack_dual(x) for x in outputs]
            return tuple(
                torch.zeros_like(x) if t is None else t.detach() for x, t in pairs
            )

    def _called(self, run: Run, weights: Weights) -> Any:
        buffers = {n: b.clone() for n, b in self._model.named_buffers()}
        inside = {f"model.{n}": x for n, x in {**buffers, **weights}.items()}
        return functional_call(self._caller, inside, (run.closure,))

    @contextmanager
    def _as_it_was(self, run: Run) -> Generator[None]:
        with ExitStack() as stack:
            stack.enter_context(self._silence())
            stack.enter_context(run.same_random())
            # a closure may differentiate by itself (a residual of derivatives); the
            # weights need no gradient here, so that nothing else makes a graph
            stack.enter_context(torch.enable_grad())
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            if "torch._dynamo" in sys.modules:  # only then something is compiled
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            if self._recurrent:
                stack.enter_context(_without_mkldnn())
                stack.enter_context(torch.backends.cudnn.flags(enabled=False))
            yield

    def _named(
        self, run: Run, weights: Weights, direction: Weights, error: Exception
    ) -> RuntimeError:
        """An error that names the layer, found by one more run."""
        entered: list[str] = []
        handles: list[Any] = []

        def leave(*_: Any) -> None:
            entered.pop()

        for name, module in self._model.named_modules():

            def enter(*_: Any, name: str = name) -> None:
                entered.append(name)

            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(leave))
        try:
            self._pushed(run, weights, direction)
        except Exception:
            pass
        finally:
            for handle in handles:
                handle.remove()
        name = entered[-1] if entered else ""
        kind = type(self._model.get_submodule(name)).__name__
        where = f"Layer {name!r} ({kind})" if name else f"The closure of this {kind}"
        return RuntimeError(
            f"{where} has no forward-mode derivative in torch: {error}. Must have one "
            "for lr='auto', momentum='auto' and damping='auto': write it with other "
            "operations, or give numbers."
        )


class _Caller(nn.Module):
    """Calls a closure while the parameters of a model inside are replaced."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.training = model.training

    def forward(self, closure: Closure) -> Any:
        return closure()


@contextmanager
def _without_mkldnn() -> Generator[None]:
    # not flags(), which would also set, and warn of, precisions that it does not change
    (enabled, *_) = torch.backends.mkldnn.set_flags(False)
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(enabled)


def _is_missing(error: Exception) -> bool:
    return isinstance(error, NotImplementedError) or "forward AD" in str(error)
