"""Layers as blocks: the table of kinds, and how a model is cut into blocks."""

from natgrad.layers.block import Block, LayerKind, Layout, Observed
from natgrad.layers.find import find_blocks
from natgrad.layers.matrices import Kronecker
from natgrad.layers.options import LayerOptions
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
