"""The papers' claims about whole trainings, as commands: what `comparison` runs.

A ResNet-8 on digits with the settings of its recipes, whose learning rates were chosen
by hand at batch 128, and one of width 8 on CIFAR-10 at batch 2,048; what a claim is
about is changed, and nothing else. Every run goes to the end of a schedule of its own
length.
"""

from __future__ import annotations

Rows = dict[str, tuple[str, ...]]


def _words(**settings: object) -> tuple[str, ...]:
    """Flags: ``refresh__kind="late"`` is ``--refresh.kind late``."""
    flags = (
        (f"--{name.replace('__', '.').replace('_', '-')}", str(value))
        for name, value in settings.items()
    )
    return tuple(word for flag in flags for word in flag)


def _halves(batch: int) -> Rows:
    """Pauloski et al., Table II and Figure 5: K-FAC needs about half of the epochs."""
    return {
        f"{name}, {epochs} epochs": (
            f"digits-{method}",
            *_words(batch=batch, epochs=epochs),
        )
        for name, method, epochs in (
            *(("SGD", "sgd", 24), ("SGD", "sgd", 12)),
            *(("K-FAC", "kfac", 12), ("K-FAC", "kfac", 6)),
        )
    }


def _styles(batch: int) -> Rows:
    """Pauloski et al., Table I: the whole damping on each factor, and inverses."""
    return {
        name: ("digits-kfac", *_words(batch=batch, curvature__style=style))
        for name, style in (
            ("inverse, the paper's", "whole"),
            ("eigendecomposition", "eigen"),
        )
    }


# Pauloski et al., Table III: statistics are estimated ten times as often.
_INTERVALS: Rows = {
    f"interval {k}": (
        "digits-kfac",
        *_words(epochs=48, refresh__statistics=k // 10, refresh__inverses=k),
    )
    for k in (10, 100, 500)
}

# Osawa et al. 2019, eq. 20 and 21: half of the run is always fresh.
_FRESH: Rows = {
    "always fresh": ("digits-spngd", *_words(epochs=24, refresh__kind="every")),
    **{
        name: (
            "digits-spngd",
            *_words(epochs=24, refresh__kind=kind, refresh__always_fresh=132),
        )
        for name, kind in (("staircase, eq. 20", "staircase"), ("late, eq. 21", "late"))
    },
}

# Osawa et al. 2020, sections 4 and 6: everything together, and all but one part.
# Momentum can be coupled to a polynomial decay alone, so both are left out together.
_POLYNOMIAL = _words(schedule__kind="polynomial", schedule__power=4.0)
_SCHEME: dict[str, tuple[str, ...]] = {
    "mixup": _words(data__mixup=0.4),
    "erasing": _words(data__erasing=0.5),
    "polynomial decay": (*_POLYNOMIAL, "--schedule.couple-momentum"),
    "rescaled weights": _words(optimizer__decay="rescaled"),
}
_LARGE = _words(batch=512, epochs=24)
_WHOLE: Rows = {
    "SP-NGD, whole scheme": (
        *("digits-spngd", *_LARGE),
        *(word for part in _SCHEME.values() for word in part),
    ),
    **{
        f"without {left_out}": (
            *("digits-spngd", *_LARGE),
            *(word for n, part in _SCHEME.items() if n != left_out for word in part),
        )
        for left_out in _SCHEME
    },
    # a polynomial of power 4 has a fifth of a constant rate's sum
    "SP-NGD, whole scheme, four times the rate": (
        *("digits-spngd", *_LARGE, *_words(optimizer__lr=4 * 0.02)),
        *(word for part in _SCHEME.values() for word in part),
    ),
    "SP-NGD, none of it": ("digits-spngd", *_LARGE),
    "SGD": ("digits-sgd", *_LARGE),
    "SGD, linear scaling, warmup": (
        *("digits-sgd", *_LARGE),
        *_words(optimizer__lr=1.2, schedule__warmup_epochs=3),
    ),
    "LARS": ("digits-lars", *_LARGE),
}


def _schedules(batch: int, epochs: float) -> Rows:
    """Ma et al., section IV-A: rates fall at 40 and 80% of this or the first budget."""
    return {
        name: (
            "digits-kfac",
            *_words(batch=batch, epochs=epochs, schedule__kind="steps"),
            *("--schedule.decay-epochs", f"{0.4 * of:g}", f"{0.8 * of:g}"),
        )
        for name, of in (("scaled schedule", epochs), ("fixed schedule", 12.0))
    }


CLAIMS: dict[str, Rows] = {
    "Half of the epochs, digits, batch 128": _halves(128),
    "Half of the epochs, digits, batch 512": _halves(512),
    "The paper's own inverse, digits, batch 128": _styles(128),
    "The paper's own inverse, digits, batch 512": _styles(512),
    "Interval of inversions, digits, batch 128, 48 epochs": _INTERVALS,
    "Intervals by epoch, digits, batch 128, 24 epochs": _FRESH,
    "The whole scheme, digits, batch 512, 24 epochs": _WHOLE,
    "Schedule, digits, batch 512, 36 epochs": _schedules(512, 36.0),
    "Schedule, digits, batch 1,024, 48 epochs": _schedules(1024, 48.0),
}

_CIFAR = _words(model__width=8, evaluate_every=1.5, targets=60)


def _epochs(method: str, epochs: int, **settings: object) -> tuple[str, ...]:
    return (f"cifar10-{method}-2048", *_CIFAR, *_words(epochs=epochs, **settings))


# Pauloski et al., Table II and Figure 5, and Osawa et al.'s whole scheme, less short
# of data than digits are.
CIFAR: dict[str, Rows] = {
    "CIFAR-10, ResNet-8 of width 8, batch 2,048": {
        "K-FAC, 15 epochs": _epochs("kfac", 15),
        "SGD, 15 epochs": _epochs("sgd", 15),
        "SGD, 30 epochs": _epochs("sgd", 30),
        "SP-NGD, 15 epochs": _epochs("spngd", 15),
        "SP-NGD, whole scheme, 15 epochs": (
            *_epochs("spngd", 15),
            *(word for part in _SCHEME.values() for word in part),
        ),
        "LARS, 15 epochs": _epochs("lars", 15),
    },
    "CIFAR-10, as above: twice the learning rate": {
        "K-FAC, 15 epochs": _epochs("kfac", 15, optimizer__lr=0.8),
        "SGD, 30 epochs": _epochs("sgd", 30, optimizer__lr=0.8),
    },
    # Pauloski et al., Table I
    "CIFAR-10, as above: the inverse of K-FAC, 15 epochs": {
        "eigendecomposition": _epochs("kfac", 15),
        "inverse, the paper's": _epochs("kfac", 15, curvature__style="whole"),
        "inverse, damping split by pi": _epochs(
            "kfac", 15, curvature__style="factored"
        ),
    },
    # Pauloski et al., Table III
    "CIFAR-10, as above: interval of K-FAC's inversions, 15 epochs": {
        "interval 5": _epochs("kfac", 15),
        **{
            f"interval {k}": _epochs(
                "kfac", 15, refresh__statistics=k // 10, refresh__inverses=k
            )
            for k in (10, 100)
        },
    },
}
CIFAR_SEEDS: dict[str, Rows] = {
    "CIFAR-10, as above: several seeds": {
        "K-FAC, 15 epochs": _epochs("kfac", 15),
        "SGD, 30 epochs": _epochs("sgd", 30),
    },
}

# Osawa et al. 2020, Figure 5 and section 7.4; 2019, Figure 6: what the approximations
# of the Fisher cost and save where every statistic is fresh, and a small network, few
# steps of it, leave room for a difference.
_FISHER = _words(model__width=8, epochs=4, refresh__kind="every")
_MIXED = _words(epochs=24, data__erasing=0.5, data__mixup=0.4)
DETAILS: dict[str, Rows] = {
    "SP-NGD on digits, ResNet-8 of width 8, batch 128, 4 epochs, always fresh": {
        name: (
            *("digits-spngd", *_FISHER),
            *_words(curvature__fisher=fisher, curvature__norm=norm),
        )
        for name, fisher, norm in (
            ("emp, unit BN", "empirical", "unit"),
            ("1mc, unit BN", "sampled", "unit"),
            ("emp, full BN", "empirical", "full"),
            ("emp, diagonal BN", "empirical", "diag"),
        )
    },
    # Osawa et al. do not print it; their published code draws it
    "SP-NGD on digits, 24 epochs, erasing, mixup: initial weights of batch norm": {
        "1": ("digits-spngd", *_MIXED),
        "N(1, 0.05^2)": ("digits-spngd", *_MIXED, *_words(model__norm_deviation=0.05)),
    },
}

# Ma et al., appendix B: how much of a grid trains, by the form of the damping.
GRID: dict[str, Rows] = {
    f"Damping, digits, batch {batch}: {name}": {
        f"lr {lr:g}, damping {damping:g}": (
            "digits-kfac",
            *_words(batch=batch, optimizer__lr=lr),
            *_words(curvature__damping=damping, curvature__style=style),
        )
        for lr in (0.03, 0.1, 0.3, 1.0)
        for damping in (0.01, 0.1, 1.0)
    }
    for batch in (128, 512)
    for name, style in (("normal", "eigen"), ("approximated", "root"))
}
