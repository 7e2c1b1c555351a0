"""A `GradScaler` on several ranks whose gradients nobody averages before it looks.

Note [Agreed overflow]
A scaler looks at the gradients of its own rank and skips the step there. Where the
optimizer itself reduces gradients, the other ranks would wait for that one forever. So
the optimizer tells the scaler that it handles overflows (as torch's fused optimizers
do): the scaler then always steps, and says what it found. That goes into the step's
agreement, all ranks skip or none does, and each rank's scaler is told of the overflow,
so that all loss scales stay the same. An optimizer that does so tells its engine
(``agrees_on_overflow``), which refuses a scaler otherwise.
"""

import torch
from torch import Tensor
from torch.optim import Optimizer

from natgrad.engine.engine import Engine


class Overflow:
    """What a scaler found in this rank's gradients, and what it is told.

    Args:
        optimizer: the one that `GradScaler.step` is called with.
        engine: the optimizer's.
        scaler: the scaler, if there is one. Where it looks at gradients that are the
            same on all ranks, it is left to do as it does.
    """

    def __init__(
        self, optimizer: Optimizer, engine: Engine, scaler: torch.amp.GradScaler | None
    ) -> None:
        self._optimizer = optimizer
        self._scaler = scaler if engine.own_gradients else None
        if self._scaler is not None:
            # the name of the attribute that GradScaler.step asks for
            setattr(optimizer, "_step_supports_amp_scaling", True)  # noqa: B010

    def unscaled(self) -> Tensor | None:
        """Divide gradients by the loss scale, unless `GradScaler.unscale_` has.

        Returns a tensor that is > 0 if the scaler found an overflow; None if the step
        is not the scaler's.
        """
        if self._scaler is None:
            return None
        scale: Tensor | None = getattr(self._optimizer, "grad_scale", None)
        if scale is not None:
            for group in self._optimizer.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.div_(scale.to(p.grad.device))
        found = getattr(self._optimizer, "found_inf", None)
        # without any gradient here it is the number 0
        return None if found is None else torch.as_tensor(found)

    def told(self, found: Tensor | None) -> bool:
        """Have this rank's scaler lower its scale, whichever rank found the overflow.

        ``found`` is what `unscaled` returned. Returns whether a scaler was told.
        """
        if self._scaler is None or found is None:
            return False
        flags = self._scaler._found_inf_per_device(  # pyright: ignore[reportPrivateUsage]
            self._optimizer
        )
        for flag in flags.values():
            flag.fill_(1.0)
        return True
