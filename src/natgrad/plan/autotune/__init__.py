"""Predicts what a plan costs on a machine, and chooses the cheapest."""

from natgrad.plan.autotune.choice import Choice, choose_strategy, sgd_exchange
from natgrad.plan.autotune.predict import (
    AGREEMENTS,
    BUCKET_BYTES,
    agree_seconds,
    departure_seconds,
    exchange_seconds,
    is_measured,
    scaled,
)
from natgrad.plan.autotune.profile import (
    Collective,
    Curve,
    HardwareProfile,
    Link,
    ModelTimes,
)
from natgrad.plan.autotune.profile_file import (
    default_path,
    load_profile,
    profile_from_dict,
    save_profile,
)

__all__ = [
    "AGREEMENTS",
    "BUCKET_BYTES",
    "Choice",
    "Collective",
    "Curve",
    "HardwareProfile",
    "Link",
    "ModelTimes",
    "agree_seconds",
    "choose_strategy",
    "default_path",
    "departure_seconds",
    "exchange_seconds",
    "is_measured",
    "load_profile",
    "profile_from_dict",
    "save_profile",
    "scaled",
    "sgd_exchange",
]
