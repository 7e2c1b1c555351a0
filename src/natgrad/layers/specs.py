"""Which statistics a block has, by its layout and by what its rule needs."""

from dataclasses import replace

from natgrad.layers.block import Layout
from natgrad.layers.options import OWN, SIDES, LayerOptions
from natgrad.plan.spec import BlockSpec, StatisticSpec


def spec_of(layout: Layout, block: str, options: LayerOptions) -> BlockSpec:
    """A block of this layout, as plans see it."""
    return BlockSpec(
        name=block,
        stack=layout.stack,
        rows=layout.rows,
        cols=layout.cols,
        statistics=statistics_of(layout, block, options),
    )


def statistics_of(
    layout: Layout, block: str, options: LayerOptions
) -> tuple[StatisticSpec, ...]:
    """The specs of the chosen statistics: right, left, and S if ``corrected``."""
    specs = _all(layout, block, options.largest_factor)
    if not layout.left:
        return specs
    specs = tuple(s for s in specs if s.side in SIDES[options.sides])
    if options.source == "gradients":
        return tuple(_own(layout, s) for s in specs)
    if not options.corrected:
        return specs
    scale = StatisticSpec(
        name=f"{block}/S",
        block=block,
        kind="S",
        side="both",
        stack=layout.stack,
        size=layout.rows * layout.cols,
        diagonal=True,
    )
    return (*specs, scale)


def _own(layout: Layout, spec: StatisticSpec) -> StatisticSpec:
    """Of the weight's own gradient: every matrix has a factor of its own."""
    kind = OWN[spec.side]
    name, stack = f"{spec.block}/{kind}", layout.stack * spec.parts
    own = replace(spec, kind=kind, name=name, stack=stack, shared=False)
    return replace(own, counted=False)


def _all(layout: Layout, block: str, largest: int | None) -> tuple[StatisticSpec, ...]:
    sides = [("right", layout.right, layout.cols)]
    if layout.left:
        sides.append(("left", layout.left, layout.rows))
    specs: list[StatisticSpec] = []
    for side, kind, rows in sides:
        parts, size = layout.cut(side, largest)
        shared = layout.shared and side == "right" and layout.stack > 1
        spec = StatisticSpec(
            name=f"{block}/{kind}",
            block=block,
            kind=kind,
            side=side,
            stack=(1 if shared else layout.stack) * parts,
            size=size,
            diagonal=side == "right" and layout.right_diagonal,
            parts=parts,
            padding=parts * size - rows,
            shared=shared,
            counted=layout.counted,
        )
        specs.append(spec)
    return tuple(specs)
