"""Datasets by name, their files, and the loaders that make batches of them."""

from natgrad_lab.data.dataset import Dataset, Split, TensorSplit, channel_moments
from natgrad_lab.data.download import Progress, RemoteFile
from natgrad_lab.data.folders import DataError, data_root
from natgrad_lab.data.images import ImageSplit, View
from natgrad_lab.data.loader import Batch, Batches, Loader
from natgrad_lab.data.pipeline import Steps, loaders, steps
from natgrad_lab.data.placement import Placement
from natgrad_lab.data.prefetch import Prefetcher
from natgrad_lab.data.sources import SOURCES, get
from natgrad_lab.data.table import NAMES, load
from natgrad_lab.data.text import TextSplit

__all__ = [
    "NAMES",
    "SOURCES",
    "Batch",
    "Batches",
    "DataError",
    "Dataset",
    "ImageSplit",
    "Loader",
    "Placement",
    "Prefetcher",
    "Progress",
    "RemoteFile",
    "Split",
    "Steps",
    "TensorSplit",
    "TextSplit",
    "View",
    "channel_moments",
    "data_root",
    "get",
    "load",
    "loaders",
    "steps",
]
