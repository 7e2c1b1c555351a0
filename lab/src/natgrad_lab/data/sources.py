"""Where each dataset comes from, and `get`, which brings it here.

The hashes are those of the files their authors publish (the CIFAR-10 archive's MD5 is
c32a1d4ab5d03f1284b67883e8d87530 on its page; Fashion-MNIST's are in its README).
"""

from collections.abc import Mapping
from pathlib import Path

from natgrad_lab.data import archive, fashion_mnist
from natgrad_lab.data.download import Progress, RemoteFile, download
from natgrad_lab.data.folders import IMAGENET_ADVICE, DataError, data_root

NOTHING_TO_GET = {
    "digits": "digits come with scikit-learn: there is nothing to download.",
    "text": "text reads files that are here (--data.folder DIR): there is nothing to "
    "download.",
    "imagenet": IMAGENET_ADVICE,
}


def _fashion(name: str, sha256: str, size: int) -> RemoteFile:
    base = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
    return RemoteFile(
        url=f"{base}/{name}", sha256=sha256, size=size, folder=fashion_mnist.FOLDER
    )


SOURCES: dict[str, tuple[RemoteFile, ...]] = {
    "cifar10": (
        RemoteFile(
            url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            size=170_052_171,
            unpack=True,
        ),
    ),
    "fashion_mnist": (
        _fashion(
            "train-images-idx3-ubyte.gz",
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            26_421_880,
        ),
        _fashion(
            "train-labels-idx1-ubyte.gz",
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            29_515,
        ),
        _fashion(
            "t10k-images-idx3-ubyte.gz",
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            4_422_102,
        ),
        _fashion(
            "t10k-labels-idx1-ubyte.gz",
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
            5_148,
        ),
    ),
}


def get(
    name: str,
    root: str | Path | None = None,
    progress: Progress | None = None,
    *,
    sources: Mapping[str, tuple[RemoteFile, ...]] = SOURCES,
) -> Path:
    """Download a dataset's files, check them and unpack them.

    Args:
        name: a key of `sources`.
        root: the folder of all datasets; see `data_root`.
        progress: told (file name, bytes so far, bytes in all).
        sources: what to download for each name.

    Returns:
        The folder of all datasets.

    Raises:
        DataError: there is nothing to get, or a file is missing, wrong or unsafe.
    """
    if name not in sources:
        legal = ", ".join(sources)
        default = f"Invalid data {name=}. Must be one of {legal}."
        raise DataError(NOTHING_TO_GET.get(name, default))
    place = data_root(root)
    for file in sources[name]:
        path = download(file, place / file.folder, progress)
        if file.unpack:
            archive.extract(path, place / file.folder)
    return place
