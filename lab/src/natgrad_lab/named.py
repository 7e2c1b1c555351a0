"""Parts of an update by their names: what flags and files call rules, lengths and more.

Whatever is not given keeps the value that the optimizer's defaults have.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from natgrad import (
    EKFAC,
    SOAP,
    Adam,
    Adaptive,
    AverageGradients,
    AverageUpdates,
    Coupled,
    Decoupled,
    EigenAdam,
    Every,
    Free,
    KLClip,
    Kronecker,
    LayerTrust,
    Muon,
    MuonLength,
    Options,
    Orthogonal,
    Paced,
    Plain,
    Refresh,
    Rescaled,
    Shampoo,
)
from natgrad_lab.errors import UserError

Kinds = Mapping[str, Any]

RULES: Kinds = {kind.name: kind for kind in (Kronecker, EKFAC, EigenAdam, Orthogonal)}
FALLBACKS: Kinds = {kind.name: kind for kind in (Plain, Adam)}
PRESETS: Mapping[str, Options] = {
    "muon": Muon.defaults,
    "soap": SOAP.defaults,
    "shampoo": Shampoo.defaults,
}
LENGTHS: Kinds = {
    "free": Free,
    "kl_clip": KLClip,
    "layer_trust": LayerTrust,
    "muon": MuonLength,
}
AVERAGES: Kinds = {"updates": AverageUpdates, "gradients": AverageGradients}
DECAYS: Kinds = {"coupled": Coupled, "decoupled": Decoupled, "rescaled": Rescaled}


def given(**settings: Any) -> dict[str, Any]:
    """Those that are not None."""
    return {name: value for name, value in settings.items() if value is not None}


def changed(start: Any, kinds: Kinds, name: str | None, **settings: Any) -> Any:
    """A part: that of the defaults or of another kind, with the settings given."""
    kind = type(start) if name is None else kinds[name]
    known = {field.name for field in dataclasses.fields(kind)}
    for setting, value in given(**settings).items():
        if setting not in known:
            has = f"has {', '.join(sorted(known))}" if known else "has no settings"
            raise UserError(f"Invalid {setting}={value!r}: {kind.__name__} {has} only.")
    part = start if type(start) is kind else kind()
    return dataclasses.replace(part, **given(**settings))


def timed(start: Refresh, statistics: int | None, inverses: int | None) -> Every:
    """`Every` with these intervals; what is None is as in the defaults, or 1."""
    policy = start.policy if isinstance(start, Paced) else start
    known = policy if isinstance(policy, Every) else Every()
    times = given(statistics=statistics, inverses=inverses)
    return dataclasses.replace(known, **times, early=False)


def adaptive(start: Refresh, tolerance: float | None) -> Adaptive:
    """`Adaptive` with this tolerance; if None as in the defaults, or its own."""
    known = start if isinstance(start, Adaptive) else Adaptive()
    return dataclasses.replace(known, **given(tolerance=tolerance))
