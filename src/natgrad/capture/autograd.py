"""What capturing asks of autograd: which backward runs, and for whose gradients."""

# pyright: reportPrivateUsage=false
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle


def backward_id() -> int:
    """The number of the backward that runs now; -1 outside of one."""
    return torch._C._current_graph_task_id()


def accumulates(p: Tensor) -> bool | None:
    """Whether the backward that runs now also makes the gradient of a leaf.

    One that only asks for gradients of inputs (an adversary's, a saliency map) does
    not, though it passes through the same layers. None if ``torch.autograd.grad`` was
    asked for the leaf's gradient, which may or may not become its ``.grad``.
    """
    node = get_gradient_edge(p).node
    try:
        return torch._C._will_engine_execute_node(node)  # pyright: ignore
    except RuntimeError:
        # what torch says of a leaf that autograd.grad was asked for by name
        return None


class Sentinel:
    """Watches one parameter, whose gradient stands for all of a step's."""

    def __init__(self) -> None:
        self._watched: nn.Parameter | None = None
        self._hook: RemovableHandle | None = None
        self._version: int | None = None

    @property
    def is_set(self) -> bool:
        """Whether there is something to watch."""
        return self._watched is not None

    def watch(self, p: nn.Parameter | None) -> None:
        """Take the gradient of ``p`` as a sign that the step's gradients are kept."""
        if self._hook is not None:
            self._hook.remove()
        self._watched, self._hook, self._version = p, None, None
        if p is not None:
            self._hook = p.register_post_accumulate_grad_hook(self._note)

    def is_cleared(self) -> bool:
        """Whether the gradient had arrived and is gone again, or zero."""
        # Before it has arrived, a gradient cannot have been cleared: a backward within
        # a backward (activation checkpointing) may ask.
        if self._watched is None or self._version is None:
            return False
        grad = self._watched.grad
        if grad is None:
            return True
        # A zero_grad(set_to_none=False) writes; only after a write is it worth the
        # synchronisation to look at the values.
        return grad._version != self._version and not bool(grad.any())

    def _note(self, p: Tensor) -> None:
        self._version = -1 if p.grad is None else p.grad._version
