"""Hooks on a model and on autograd that also work when it is compiled or copied.

Note [Compiled models]
`torch.compile` does not notice hooks that change, and hooks that do anything cut its
graph at every layer. So in a step in which something is due, compiled code runs as
written (`torch.compiler.set_stance`), hooks and all. In all other steps the hooks do
nothing but read one flag, and the graph is that of the model alone. This holds for
hooks that were placed before and after the model was compiled or first called.

Note [Who keeps whom]
Hooks do not keep alive what they call: that is the optimizer's or the user's. When it
is dropped, they go. A layer has the hooks of one natgrad optimizer at a time.

Note [Saved models]
A module's hooks are part of what is copied and pickled with it. Ours are left out, so
that ``torch.save(model)`` writes what it would write without us: types of modules that
have our hooks get a reducer (`copyreg`), which for all other modules changes nothing.
"""

# pyright: reportPrivateUsage=false
import copyreg
import gc
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from natgrad.capture.attention import Projections
from natgrad.layers import Block
from natgrad.math.shards import is_shard, local

BeforeModel = Callable[[tuple[Any, ...], dict[str, Any]], None]
AfterModel = Callable[[Any], None]
AfterLayer = Callable[
    [Block, nn.Module, tuple[Any, ...], dict[str, Any], Any],
    None,
]


Function = TypeVar("Function", bound=Callable[..., Any])


def as_written(function: Function) -> Function:
    """The function, never compiled."""
    return cast(Function, torch.compiler.disable(function))


class _Stance:
    """Whether compiled code runs as written, for the whole process."""

    def __init__(self) -> None:
        self.watched: weakref.WeakSet[Hooks] = weakref.WeakSet()
        self._eager: Any = None

    def choose(self) -> None:
        """As written while any model is watched; else as it was before."""
        eager = any(True for _ in self.watched)
        if eager and self._eager is None:
            self._eager = torch.compiler.set_stance("force_eager")
        elif not eager and self._eager is not None:
            self._eager.__exit__(None, None, None)
            self._eager = None


_STANCE = _Stance()
_WATCHED: weakref.WeakKeyDictionary[nn.Module, "weakref.ref[Hooks]"] = (
    weakref.WeakKeyDictionary()
)


def require_unwatched(blocks: Sequence[Block]) -> None:
    """Raise if a layer has the hooks of another natgrad optimizer."""
    if not _watched(blocks):
        return
    gc.collect()  # one that was dropped may be part of a cycle
    watched = _watched(blocks)
    if watched:
        raise RuntimeError(
            f"Layers {', '.join(watched)} are watched by another natgrad optimizer. "
            "A model has one natgrad optimizer at a time: close() the other first."
        )


def _watched(blocks: Sequence[Block]) -> list[str]:
    found: list[str] = []
    for block in blocks:
        hooks = [_WATCHED[m]() for m in block.modules if m in _WATCHED]
        if any(h is not None and h.placed for h in hooks):
            found.append(block.name)
    return found


def _weakly(method: Function) -> Function:
    """A bound method that does nothing once its object is gone."""
    find = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        found = find()
        if found is not None:
            found(*args)

    return cast(Function, call)


class Hooks:
    """Calls back around a model's forward and after each layer's, while ``watching``.

    A copy of the model, or what is saved of it, does not have them.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: list[Block],
        before_model: BeforeModel,
        after_model: AfterModel,
        after_layer: AfterLayer,
    ) -> None:
        self.watching = False
        # See Note [Who keeps whom].
        # A caller may have set the stance itself: then the graph is cut after all.
        self._before_model = as_written(_weakly(before_model))
        self._after_model = as_written(_weakly(after_model))
        self._after_layer = as_written(_weakly(after_layer))
        self._handles: list[RemovableHandle] = []
        self._place(
            model,
            model.register_forward_pre_hook(self._model_hook, with_kwargs=True),
            model.register_forward_hook(self._output_hook),
        )
        for block in blocks:
            for module in block.modules:
                hook = partial(self._layer_hook, block)
                # before tensor parallelism's own, which hides how outputs are cut
                handle = module.register_forward_hook(
                    hook, with_kwargs=True, prepend=block.is_parallel
                )
                self._place(module, handle)
                _WATCHED[module] = weakref.ref(self)
        self._open: dict[nn.Module, Projections] = {}
        self._place_on_attention(model, blocks)

    def _place_on_attention(self, model: nn.Module, blocks: list[Block]) -> None:
        """See Note [Projections of attention]."""
        known: dict[nn.Module, Block] = {m: b for b in blocks for m in b.modules}
        for module in model.modules():
            if not isinstance(module, nn.MultiheadAttention):
                continue
            both: list[nn.Module] = [module, module.out_proj]
            its = {m: known[m] for m in both if m in known}
            if its:
                before = partial(self._before_attention, its)
                after = self._after_attention
                self._place(
                    module,
                    module.register_forward_pre_hook(before),
                    module.register_forward_hook(after, always_call=True),
                )

    def _place(self, module: nn.Module, *handles: RemovableHandle) -> None:
        self._handles += handles
        _OURS.update(handle.id for handle in handles)
        leave_out_of_copies(type(module))

    @property
    def placed(self) -> bool:
        """Whether the hooks are on the model."""
        return bool(self._handles)

    def watch(self, on: bool) -> None:
        """Call back, or not, from the next forward on."""
        self.watching = on
        (_STANCE.watched.add if on else _STANCE.watched.discard)(self)
        _STANCE.choose()

    def close(self) -> None:
        """Remove every hook."""
        self.watch(False)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _model_hook(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self.watching:
            self._before_model(args, kwargs)

    def _output_hook(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.watching:
            self._after_model(output)

    def _before_attention(
        self, its: dict[nn.Module, Block], module: nn.MultiheadAttention, _: Any
    ) -> None:
        def seen(owner: nn.Module, x: Tensor, y: Tensor) -> None:
            if owner in its:
                self._after_layer(its[owner], owner, (x,), {}, y)

        if self.watching:
            self._open[module] = Projections(module, seen)
            self._open[module].__enter__()

    def _after_attention(self, module: nn.Module, _: Any, output: Any) -> None:
        if module in self._open:
            self._open.pop(module).__exit__(None, None, None)

    def _layer_hook(
        self,
        block: Block,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        if self.watching and not isinstance(module, nn.MultiheadAttention):
            self._after_layer(block, module, args, kwargs, output)


# Numbers of hooks; torch gives each one only once.
_OURS: set[int] = set()
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
_PROTOCOL = 2
"""From which on modules are pickled in the same way."""

Reducer = Callable[[Any], Any]


def leave_out_of_copies(kind: type[nn.Module]) -> None:
    """Copy and pickle modules of a type without our hooks. See Note [Saved models]."""
    reduce: Reducer | None = copyreg.dispatch_table.get(kind)
    if not isinstance(reduce, _WithoutHooks):
        copyreg.dispatch_table[kind] = _WithoutHooks(reduce)


class _WithoutHooks:
    """Reduces a module to what it would be reduced to without us."""

    def __init__(self, reduce: Reducer | None) -> None:
        self._reduce = reduce

    def __call__(self, module: nn.Module) -> Any:
        reduce = self._reduce
        reduced = reduce(module) if reduce else module.__reduce_ex__(_PROTOCOL)
        if isinstance(reduced, str) or len(reduced) < 3:
            return reduced
        make, arguments, state, *rest = reduced
        if isinstance(state, dict):
            state = {k: _others(v) if k in _HOOKS else v for k, v in state.items()}
        return make, arguments, state, *rest


def _others(hooks: Any) -> Any:
    """The hooks of a module that are not ours; the very same dict if none is ours."""
    if not isinstance(hooks, dict) or _OURS.isdisjoint(hooks):
        return hooks
    return type(hooks)((k, v) for k, v in hooks.items() if k not in _OURS)


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


def leaf_of(block: Block, module: nn.Module) -> Callable[[], Tensor]:
    """What finds, in a backward, the leaf that a weight's gradient goes to.

    Under `fully_shard` that is the whole weight, which a module has while it runs:
    in its forward, unless it is itself what was sharded, and then in its backward. Of a
    parallel layer we are called before it is cut again.
    """
    assert block.kind is not None
    weight = block.kind.weight(module)
    later = is_shard(weight) and not block.is_parallel
    return partial(block.kind.weight, module) if later else lambda: weight


class Sentinel:
    """Watches the gradient of one parameter, to see when a step's were cleared."""

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
        if p is not None and not is_shard(p):
            self._hook = p.register_post_accumulate_grad_hook(self._note)
        self.expect()

    def expect(self) -> None:
        """Of a sharded parameter: look when the backward that runs now is over.

        `fully_shard` puts the gradient there at that time, not autograd; and while
        it keeps gradients of micro-batches to itself, there is none to be cleared.
        """
        p = self._watched
        if p is not None and is_shard(p) and backward_id() != -1:
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(partial(self._arrived, p))

    def is_cleared(self) -> bool:
        """Whether the gradient had arrived and is gone again, or zero."""
        # Before it has arrived, a gradient cannot have been cleared: a backward within
        # a backward (activation checkpointing) may ask.
        if self._watched is None or self._version is None:
            return False
        if self._watched.grad is None:
            return True
        # A zero_grad(set_to_none=False) writes; only after a write is it worth the
        # synchronisation to look at the values.
        grad = local(self._watched.grad)
        is_written = grad._version != self._version and grad.numel() > 0
        return is_written and not bool(grad.any())

    def _note(self, p: Tensor) -> None:
        self._version = -1 if p.grad is None else local(p.grad)._version

    def _arrived(self, p: Tensor) -> None:
        if p is self._watched and p.grad is not None:
            self._note(p)
