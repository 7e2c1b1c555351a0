"""Optimizers with any options, for tests whose options come from tables."""

from dataclasses import replace
from typing import Any, TypeVar

from torch import nn

import natgrad

Kind = TypeVar("Kind", natgrad.KFAC, natgrad.SPNGD, natgrad.Polar)


def construct(
    kind: type[Kind],
    model: nn.Module,
    second: Any = None,
    *,
    grad_scaler: Any = None,
    **options: Any,
) -> Kind:
    """The class's defaults with some fields of `natgrad.Options` replaced.

    ``second`` is KFAC's optimizer, or the parameter groups of the others.
    """
    chosen = replace(kind.defaults, **options)
    return kind(model, second, grad_scaler=grad_scaler, options=chosen)
