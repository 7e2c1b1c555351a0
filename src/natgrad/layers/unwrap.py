"""The module inside `DistributedDataParallel` and `torch.compile`."""

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def unwrap(model: nn.Module) -> tuple[nn.Module, bool]:
    """The plain module, and whether DDP averages its gradients."""
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise TypeError(
            f"Invalid model: a {kind}. Must be the model itself (an nn.Module), not "
            "its parameters or optimizer: KFAC(model, optimizer), "
            "SPNGD(model, lr=0.02), Polar(model)."
        )
    ddp = False
    while True:
        if isinstance(model, DistributedDataParallel):
            model, ddp = model.module, True
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model, ddp


def inside_ddp(model: nn.Module) -> bool:
    """Whether this is a forward of the model that DDP has called.

    Trainers wrap a model after optimizers are made, so that its type says nothing.
    """
    # the only trace that DDP leaves; torch's compiler looks at it as well
    active = DistributedDataParallel._active_ddp_module  # pyright: ignore[reportPrivateUsage]
    return active is not None and any(m is model for m in active.modules())
