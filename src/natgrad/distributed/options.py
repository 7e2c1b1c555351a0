"""How exchanges run: what a user may choose."""

from dataclasses import dataclass

import torch

from natgrad.math.precision import HALF
from natgrad.plan import EXCHANGES
from natgrad.plan.messages import WAYS, Way, Wiring
from natgrad.plan.strategies import Ranks
from natgrad.requiring import require_count


@dataclass(frozen=True, kw_only=True)
class CommOptions:
    """How exchanges run. The result does not depend on it, except for precision.

    Attributes:
        bucket_bytes: Items are sent together up to this size.
        overlap: Whether full buckets leave at once or all wait for ``finish``.
        precision: None, torch.float16 or torch.bfloat16: what ``half`` is sent in.
        half: The exchanges sent in ``precision``; SP-NGD halves its all-gather only.
            ``share_updates`` of `SPNGD` has then the changes of weights.
        hierarchical: Reduce within hosts, then between them; share between them, then
            within. "auto" does so when there are several hosts with the same number of
            ranks, more than one.
        collectives: "rooted", a reduce or a broadcast for each rank that has a part in
            a bucket; "padded", one reduce-scatter or all-gather of equal parts; "auto",
            padded on NCCL and rooted on gloo, where that was measured to be faster.
        timeout: Seconds after which a collective that waits for a rank fails.
        check_weights: Steps between two comparisons of the weights of all ranks, >= 1:
            different ones are an error on every rank. None: they are never compared.
    """

    bucket_bytes: int = 25 * 2**20
    overlap: bool = True
    precision: torch.dtype | None = None
    half: tuple[str, ...] = ("share_inverses", "share_updates")
    hierarchical: bool | str = "auto"
    collectives: str = "auto"
    timeout: float = 600.0
    check_weights: int | None = 100

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1:
            raise ValueError(f"Invalid bucket_bytes={self.bucket_bytes}. Must be >= 1.")
        if self.precision not in (None, *HALF):
            legal = (None, *HALF)
            raise ValueError(f"Invalid precision={self.precision}. Must be in {legal}.")
        if not set(self.half) <= set(EXCHANGES):
            raise ValueError(f"Invalid half={self.half}. Must be among {EXCHANGES}.")
        reduced = [name for name in self.half if name.startswith("reduce")]
        if self.precision == torch.float16 and reduced:
            raise ValueError(
                f"Invalid half={self.half} with float16, whose range sums exceed. "
                "Must be shares only, or precision=torch.bfloat16."
            )
        if self.hierarchical not in ("auto", True, False):
            raise ValueError(
                f"Invalid hierarchical={self.hierarchical!r}. "
                "Must be 'auto', True or False."
            )
        if self.collectives not in ("auto", *WAYS):
            legal = ("auto", *WAYS)
            raise ValueError(
                f"Invalid collectives={self.collectives!r}. Must be in {legal}."
            )
        if not self.timeout > 0:
            raise ValueError(f"Invalid timeout={self.timeout}. Must be > 0.")
        if self.check_weights is not None:
            require_count("check_weights", self.check_weights, also=", or None")

    def way(self, backend: str) -> Way:
        """How buckets are sent on a backend: "rooted" or "padded"."""
        if self.collectives == "auto":
            return "padded" if "nccl" in backend else "rooted"
        return "padded" if self.collectives == "padded" else "rooted"

    def wiring(
        self, dtype: torch.dtype, nodes: tuple[Ranks, ...] = (), way: Way = "rooted"
    ) -> Wiring:
        """How exchanges of tensors of a dtype become collectives."""
        return Wiring(
            bucket_bytes=self.bucket_bytes,
            element_bytes=dtype.itemsize,
            sent_bytes={x: self.wire_dtype(x, dtype).itemsize for x in EXCHANGES},
            nodes=nodes,
            way=way,
        )

    def wire_dtype(self, exchange: str, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which an exchange sends tensors of ``dtype``."""
        return (self.precision or dtype) if exchange in self.half else dtype
