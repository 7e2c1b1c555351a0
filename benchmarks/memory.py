"""Peak memory of a step, from the allocations that torch reports.

Scratch space inside of libraries (BLAS, oneDNN) is not seen.
"""

from torch.profiler import ProfilerActivity, profile

from benchmarks.common import Contender


def peak(contender: Contender, kind: str) -> int:
    """Bytes in use at the highest point of a step, beyond those at its start."""
    contender.prepare(kind)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        contender.step()
    results = recorded.profiler.kineto_results  # pyright: ignore[reportOptionalMemberAccess]
    events = [e for e in results.events() if e.name() == "[memory]"]  # pyright: ignore[reportOptionalMemberAccess]
    used = highest = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        used += event.nbytes()
        highest = max(highest, used)
    return highest
