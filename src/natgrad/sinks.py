"""Where the records of `watch` can go, besides any function of a dict."""

import json
from pathlib import Path
from typing import Any, Protocol


class JsonlSink:
    """Appends records to a file, one JSON object a line, and flushes each."""

    def __init__(self, path: str | Path) -> None:
        self._file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115

    def __call__(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class _ScalarWriter(Protocol):
    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...


class TensorBoardSink:
    """Writes a scalar for each block and quantity: ``diagnostics/<quantity>/<block>``.

    ``writer`` is a ``torch.utils.tensorboard.SummaryWriter`` or has its ``add_scalar``.
    """

    def __init__(self, writer: _ScalarWriter) -> None:
        self._writer = writer

    def __call__(self, record: dict[str, Any]) -> None:
        for kind in ("blocks", "statistics"):
            for name, values in record[kind].items():
                for quantity, value in values.items():
                    if isinstance(value, int | float):
                        tag = f"diagnostics/{quantity}/{name}"
                        self._writer.add_scalar(tag, value, record["step"])
