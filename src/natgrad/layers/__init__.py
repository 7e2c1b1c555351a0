"""Layers as blocks: the table of kinds, and how a model is cut into blocks."""

from natgrad.layers.block import Block, find_blocks
from natgrad.layers.kind import Kronecker, LayerKind, LayerOptions, Layout, Observed
from natgrad.layers.table import register_layer

__all__ = [
    "Block",
    "Kronecker",
    "LayerKind",
    "LayerOptions",
    "Layout",
    "Observed",
    "find_blocks",
    "register_layer",
]
