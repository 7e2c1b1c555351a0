"""Traces of a step, and the proof of overlap in them.

Note [What counts as overlap]
A collective overlaps with backward if work of the backward begins after the collective
was started and before it was complete. It is not enough that both lie in the same step,
or that a collective is started before the backward ends: somebody must compute
meanwhile.
"""

import gzip
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

BACKWARD = "backward"
COMPUTE = ("aten::convolution_backward", "aten::mm", "aten::addmm", "aten::bmm")
KEPT = (BACKWARD, "forward", "optimizer step", *COMPUTE, "aten::convolution")


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """A collective that ran under the backward."""

    name: str
    begin: float
    end: float
    computed: int
    """Operations of the backward that began meanwhile."""


def record(step: Callable[[], None], path: Path) -> None:
    """Write a chrome trace of one step, with what matters for overlap only."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        step()
    whole = path.with_suffix(".whole.json")
    recorded.export_chrome_trace(str(whole))
    trace = json.loads(whole.read_text())
    whole.unlink()
    write(path, shrink(trace["traceEvents"]))


def shrink(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Collectives, convolutions and products, from time 0 on, without their details."""
    kept = [e for e in events if e.get("ph") == "X" and _matters(str(e["name"]))]
    start = min((e["ts"] for e in kept), default=0.0)
    threads = {tid: i for i, tid in enumerate(dict.fromkeys(e["tid"] for e in kept))}
    return [
        {
            "name": e["name"],
            "ph": "X",
            "pid": 0,
            # Collectives get a row of their own: they end on another thread.
            "tid": "communication" if is_collective(e) else threads[e["tid"]],
            "ts": round(e["ts"] - start, 1),
            "dur": round(e["dur"], 1),
        }
        for e in kept
    ]


def _matters(name: str) -> bool:
    return name in KEPT or name.startswith("gloo:")


def is_collective(event: dict[str, Any]) -> bool:
    """Whether an event is a collective of gloo or NCCL."""
    return str(event["name"]).startswith(("gloo:", "nccl:"))


def write(path: Path, events: Sequence[dict[str, Any]]) -> None:
    """A gzipped trace that chrome://tracing and Perfetto open."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"traceEvents": list(events)}, separators=(",", ":"))
    # a fixed time in the header: the same trace is the same file
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a trace that `write` made."""
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def find_overlap(events: Sequence[dict[str, Any]]) -> list[Overlap]:
    """The collectives that ran under the backward: Note [What counts as overlap]."""
    work = _work(events)
    found: list[Overlap] = []
    for event in filter(is_collective, events):
        begin, end = _span(event)
        computed = sum(begin < start < end for start in work)
        if computed:
            found.append(
                Overlap(name=event["name"], begin=begin, end=end, computed=computed)
            )
    return found


def sent_early(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The collectives that were started while the backward had work left to begin.

    Whether they also lasted until then depends on the machine; `find_overlap` asks.
    """
    last = max(_work(events), default=0.0)
    return [e for e in filter(is_collective, events) if e["ts"] < last]


def _work(events: Sequence[dict[str, Any]]) -> list[float]:
    """When each operation of the backward began."""
    spans = [_span(e) for e in events if e["name"] == BACKWARD]
    begins = [_span(e)[0] for e in events if e["name"] in COMPUTE]
    return [x for x in begins if any(a <= x < b for a, b in spans)]


def _span(event: dict[str, Any]) -> tuple[float, float]:
    return event["ts"], event["ts"] + event["dur"]
