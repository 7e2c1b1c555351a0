"""What is trained in both trees, in words that belong to neither.

A part is ``["Name", {fields}]``, a name and fields of natgrad's; ``driver.py`` spells
it for the tree at hand. Styles are written out where trees may have other defaults.

Left out: ``strategy="auto"`` and ``placement="measured"``, which decide from measured
seconds who works, and options that had no effect. `Budget` is here: its clock counts
what is computed (`driver.Clock`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Part = list[Any]
ONE = (1,)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to train for 20 steps.

    Attributes:
        optimizer: "kfac", "spngd" or "polar".
        network: "images", "vectors" or "tokens".
        options: fields of the optimizer's options.
        host: what KFAC works with: "sgd", "adam" or "none".
        ddp: whether the model is wrapped, where there are several ranks.
        micro: micro-batches in a step.
        resumed: the step before which everything is saved, made again and loaded.
        poisoned: the step in which one rank's input has a NaN.
        groups: whether the last layer is a parameter group of its own.
        frozen: modules that are not trained.
        scaler: whether a GradScaler scales the loss.
        watch: steps between two looks of the diagnostics; 0 is never.
        worlds: numbers of ranks.
    """

    optimizer: str = "kfac"
    network: str = "images"
    options: dict[str, Any] = field(default_factory=lambda: {})
    host: str = "sgd"
    ddp: bool = False
    micro: int = 1
    resumed: int = 0
    poisoned: int = -1
    groups: bool = False
    frozen: tuple[str, ...] = ()
    scaler: bool = False
    watch: int = 0
    dtype: str = "float32"
    worlds: tuple[int, ...] = (1, 3)


def kronecker(style: str, **fields: Any) -> Part:
    return ["Kronecker", {"style": style, **fields}]


def every(statistics: int, inverses: int) -> Part:
    return ["Every", {"statistics": statistics, "inverses": inverses}]


EIGEN, FACTORED = kronecker("eigen"), kronecker("factored")
EKFAC: Part = ["EKFAC", {"style": "eigen"}]
EIGEN_ADAM: Part = ["EigenAdam", {"sides": "both"}]
WHITENED: Part = ["Orthogonal", {"sides": "both", "style": "relative"}]
LAYER: Part = ["LayerTrust", {}]
FREE: Part = ["Free", {}]
OFTEN = every(2, 3)


def kfac(**options: Any) -> dict[str, Any]:
    return {"damping": 0.1, "refresh": OFTEN, "factor_decay": 0.8, **options}


def spngd(**options: Any) -> dict[str, Any]:
    return {"lr": 0.02, "damping": 0.1, **options}


def layered(rule: Part, **options: Any) -> dict[str, Any]:
    """SPNGD at the norm of each layer's weight, decay decoupled."""
    parts = {"rule": rule, "length": LAYER, "decay": ["Decoupled", {}]}
    return spngd(**parts, weight_decay=0.1, **options)


DEFAULTS = {
    "KFAC": Case(),
    "KFAC on vectors": Case(worlds=ONE, network="vectors"),
    "SPNGD": Case(optimizer="spngd", options={"lr": 0.02}),
    "Polar": Case(optimizer="polar", options={"lr": 0.02}),
}

RULES = {
    "KFAC eigen": Case(options=kfac(rule=EIGEN)),
    "KFAC eigen, tracked basis": Case(
        worlds=ONE, options=kfac(rule=kronecker("eigen", basis="tracked"))
    ),
    "KFAC factored": Case(worlds=ONE, options=kfac(rule=FACTORED)),
    "KFAC relative": Case(worlds=ONE, options=kfac(rule=kronecker("relative"))),
    "KFAC inputs only": Case(
        worlds=ONE, options=kfac(rule=kronecker("factored", sides="inputs"))
    ),
    "KFAC outputs only": Case(
        worlds=ONE,
        options=kfac(rule=kronecker("relative", sides="outputs"), length=FREE),
    ),
    "EKFAC": Case(options=kfac(rule=EKFAC)),
    "EKFAC on vectors": Case(worlds=ONE, network="vectors", options=kfac(rule=EKFAC)),
    "EKFAC relative, moments restarted": Case(
        worlds=ONE,
        options=kfac(rule=["EKFAC", {"style": "relative", "moments": "restart"}]),
    ),
    "EKFAC in SPNGD": Case(optimizer="spngd", options=spngd(rule=EKFAC)),
    "EigenAdam": Case(options=kfac(rule=EIGEN_ADAM)),
    "EigenAdam inputs only, tracked": Case(
        worlds=ONE,
        options=kfac(
            rule=["EigenAdam", {"sides": "inputs", "basis": "tracked", "beta2": 0.9}],
            fallback=["Adam", {"beta2": 0.9}],
        ),
    ),
    "EigenAdam in SPNGD": Case(optimizer="spngd", options=layered(EIGEN_ADAM)),
    "Orthogonal": Case(options=kfac(rule=WHITENED)),
    "Orthogonal, full whitening": Case(
        worlds=ONE,
        options=kfac(
            rule=[
                "Orthogonal",
                {"sides": "both", "style": "factored", "whitening": "full"},
            ]
        ),
    ),
    "Orthogonal in SPNGD": Case(
        optimizer="spngd",
        network="vectors",
        options=layered(["Orthogonal", {"sides": "outputs", "style": "factored"}]),
    ),
}

PARTS = {
    "KFAC, no length": Case(worlds=ONE, options=kfac(rule=EIGEN, length=FREE)),
    "KFAC, KL clip of its own": Case(
        worlds=ONE, options=kfac(rule=FACTORED, length=["KLClip", {"kappa": 1e-4}])
    ),
    "KFAC, layer trust": Case(worlds=ONE, options=kfac(rule=EIGEN, length=LAYER)),
    "KFAC without optimizer": Case(
        host="none",
        options=kfac(rule=EIGEN, length=["KLClip", {"kappa": 1e-3, "lr": 0.05}]),
    ),
    "KFAC in Adam": Case(worlds=ONE, host="adam", options=kfac(rule=FACTORED)),
    "KFAC, Adam as fallback": Case(
        worlds=ONE,
        options=kfac(rule=EIGEN, fallback=["Adam", {"rate": 0.5, "beta2": 0.9}]),
    ),
    "SPNGD, KL clip": Case(
        optimizer="spngd",
        options=spngd(rule=FACTORED, length=["KLClip", {"kappa": 1e-3}]),
    ),
    "SPNGD, weights rescaled, decay": Case(
        optimizer="spngd",
        options=spngd(decay=["Rescaled", {}], weight_decay=1e-2, momentum=0.8),
    ),
    "SPNGD, Nesterov": Case(
        worlds=ONE,
        optimizer="spngd",
        options=spngd(average=["AverageUpdates", {"nesterov": True}]),
    ),
    "SPNGD, averaged gradients": Case(
        worlds=ONE,
        optimizer="spngd",
        options=spngd(
            average=["AverageGradients", {"nesterov": False}], weight_decay=0.1
        ),
    ),
    "SPNGD, parameter groups": Case(
        optimizer="spngd", groups=True, options=spngd(weight_decay=1e-2)
    ),
    "Polar, its options": Case(
        optimizer="polar",
        options={
            "lr": 0.05,
            "momentum": 0.7,
            "weight_decay": 0.1,
            "damping": 0.3,
            "factor_decay": 0.5,
            "fallback": ["Adam", {"rate": 0.5, "beta2": 0.9}],
            "subsample": 1,
        },
    ),
    "Polar, parameter groups": Case(
        worlds=ONE,
        optimizer="polar",
        groups=True,
        options={"lr": 0.02, "refresh": OFTEN},
    ),
}

LAYERS = {
    **{
        f"norm {form}, KFAC": Case(worlds=ONE, options=kfac(norm=form))
        for form in ("unit", "diag", "full")
    },
    **{
        f"norm {form}, SPNGD": Case(
            worlds=ONE, optimizer="spngd", options=spngd(norm=form)
        )
        for form in ("diag", "full")
    },
    "norm with a damping of its own": Case(
        worlds=ONE, options=kfac(norm="diag", norm_damping_ratio=3.0)
    ),
    "embedding, KFAC": Case(network="tokens", options=kfac(loss="tokens")),
    "embedding, EKFAC": Case(
        worlds=ONE, network="tokens", options=kfac(loss="tokens", rule=EKFAC)
    ),
    "embedding, EigenAdam": Case(
        worlds=ONE, network="tokens", options=kfac(loss="tokens", rule=EIGEN_ADAM)
    ),
    "embedding, SPNGD": Case(
        worlds=ONE, optimizer="spngd", network="tokens", options=spngd(loss="tokens")
    ),
    "embedding, Polar": Case(
        optimizer="polar", network="tokens", options={"lr": 0.02, "loss": "tokens"}
    ),
    "positions reduced": Case(
        worlds=ONE, network="tokens", options=kfac(sharing="reduce")
    ),
    "layers skipped and frozen": Case(frozen=("0",), options=kfac(skip=["7"])),
}

ESTIMATES = {
    "accumulation, mean": Case(micro=3, options=kfac()),
    "accumulation, sum": Case(worlds=ONE, micro=2, options=kfac(accumulation="sum")),
    "accumulation, Polar": Case(
        worlds=ONE, optimizer="polar", micro=2, options={"lr": 0.02}
    ),
    "loss summed": Case(
        worlds=ONE, options=kfac(loss="sum", length=["KLClip", {"kappa": 1e-4}])
    ),
    "sampled Fisher, KFAC": Case(options=kfac(fisher="sampled")),
    "sampled Fisher, EKFAC": Case(
        worlds=ONE, options=kfac(fisher="sampled", rule=EKFAC)
    ),
    "sampled Fisher, SPNGD": Case(
        worlds=ONE, optimizer="spngd", options=spngd(fisher="sampled")
    ),
    "every second example": Case(options=kfac(subsample=2)),
    "damping by a schedule": Case(
        worlds=ONE, options=kfac(damping=["Halved", {"start": 0.2, "every": 4}])
    ),
    "float64": Case(worlds=ONE, dtype="float64", options=kfac(rule=EIGEN, norm="full")),
    "GradScaler": Case(scaler=True, ddp=True, options=kfac()),
    "a step that is not finite, KFAC": Case(poisoned=7, options=kfac()),
    "a step that is not finite, Polar": Case(
        worlds=ONE,
        optimizer="polar",
        network="vectors",
        poisoned=7,
        options={"lr": 0.02},
    ),
    "watched": Case(watch=4, options=kfac(factor_decay=0.0)),
}

REFRESHES = {
    "Adaptive, KFAC": Case(options=kfac(refresh=["Adaptive", {"tolerance": 0.2}])),
    "Adaptive, SPNGD": Case(
        optimizer="spngd", options=spngd(refresh=["Adaptive", {"tolerance": 0.3}])
    ),
    "Budget, KFAC": Case(options=kfac(refresh=["Budget", {"overhead": 0.05}])),
    "Budget, SPNGD": Case(
        optimizer="spngd", options=spngd(refresh=["Budget", {"overhead": 0.1}])
    ),
    "Scheduled": Case(
        worlds=ONE,
        options=kfac(refresh=["Scheduled", {"steps_per_epoch": 1, "always_fresh": 3}]),
    ),
    "resumed in mid-interval, KFAC": Case(
        resumed=11, options=kfac(rule=EIGEN, refresh=every(3, 7))
    ),
    "resumed in mid-interval, EKFAC": Case(
        resumed=11, options=kfac(rule=EKFAC, refresh=every(3, 7))
    ),
    "resumed in mid-interval, EigenAdam": Case(
        worlds=ONE, resumed=11, options=kfac(rule=EIGEN_ADAM, refresh=every(3, 7))
    ),
    "resumed in mid-interval, SPNGD": Case(
        optimizer="spngd", resumed=11, options=spngd(norm="full")
    ),
    "resumed in mid-interval, Polar": Case(
        optimizer="polar", resumed=12, options={"lr": 0.02}
    ),
}

MORE = {  # than the optimizer's own, which the other cases have
    "kfac": ("layer_wise", "spngd", "hybrid(0.67)"),
    "spngd": ("factor_wise", "layer_wise", "hybrid(0.67)"),
    "polar": ("factor_wise", "layer_wise", "hybrid(0.67)"),
}


def _spread() -> dict[str, Case]:
    """Every strategy with gradients that natgrad reduces, and with DDP's."""
    made: dict[str, tuple[str, dict[str, Any]]] = {
        "KFAC eigen": ("kfac", kfac(rule=EIGEN)),
        "EKFAC": ("kfac", kfac(rule=EKFAC)),
        "EigenAdam": ("kfac", kfac(rule=EIGEN_ADAM)),
        "SPNGD": ("spngd", spngd(norm="full")),
        "Polar": ("polar", {"lr": 0.02}),
    }
    wrapped = [("KFAC eigen", "factor_wise"), ("SPNGD", "spngd"), ("Polar", "spngd")]
    wrapped += [("KFAC eigen", "layer_wise"), ("KFAC eigen", "spngd")]
    whole = ("KFAC eigen", "SPNGD", "Polar")
    wrapped += [(name, "hybrid(0.67)") for name in whole]
    own = [(name, s) for name in whole for s in MORE[made[name][0]]]
    own += [("EKFAC", "spngd"), *((name, "hybrid(0.67)") for name in made)]
    return {
        f"{name}, {strategy}{', DDP' if ddp else ''}": Case(
            optimizer=made[name][0],
            options={**made[name][1], "strategy": strategy},
            ddp=ddp,
            worlds=(3,),
        )
        for ddp, pairs in ((False, own), (True, wrapped))
        for name, strategy in pairs
    }


def _sent(precision: str, **fields: Any) -> Part:
    return ["CommOptions", {"precision": f"torch.{precision}", **fields}]


RANKS = {
    **_spread(),
    "round robin": Case(options=kfac(placement="round_robin"), worlds=(3,)),
    "float16, KFAC": Case(options=kfac(comm=_sent("float16")), worlds=(3,)),
    "float16, SPNGD": Case(
        optimizer="spngd", options=spngd(comm=_sent("float16")), worlds=(3,)
    ),
    "bfloat16 everywhere, KFAC": Case(
        options=kfac(
            comm=_sent(
                "bfloat16",
                half=[
                    "reduce_statistics",
                    "reduce_gradients",
                    "share_inverses",
                    "share_updates",
                ],
            )
        ),
        worlds=(3,),
    ),
    "bfloat16, Polar": Case(
        optimizer="polar", options={"lr": 0.02, "comm": _sent("bfloat16")}, worlds=(3,)
    ),
    "small buckets, no overlap": Case(
        options=kfac(comm=["CommOptions", {"bucket_bytes": 256, "overlap": False}]),
        worlds=(3,),
    ),
}

CASES: dict[str, Case] = {
    **DEFAULTS,
    **RULES,
    **PARTS,
    **LAYERS,
    **ESTIMATES,
    **REFRESHES,
    **RANKS,
}
