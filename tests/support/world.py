"""Run a function on N ranks: real processes, gloo over loopback.

Processes are forked from a server that has imported what tests import, so a world of
four starts in a fraction of a second.
"""

from __future__ import annotations

import os
import pickle
import time
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from multiprocessing import connection, get_context
from typing import Any

import torch
import torch.distributed as dist
from tests.support.facts import starts_processes
from torch.nn.parallel import DistributedDataParallel

CHECKED = os.environ.get("TESTS_CHECK_COLLECTIVES", "") == "1"
"""Whether torch compares each collective across ranks before it starts.

As with TORCH_DISTRIBUTED_DEBUG=DETAIL, which would crash DDP in all processes that
tests start: see `plain_group`. Ranks are then held in a barrier that nothing ends
before the timeout, so worlds that lose a rank go without. So do those in which a rank
starts an exchange of natgrad before a collective of torch's, and another after it: by
node beside DDP, where on a CPU the second stage waits for the first to be complete.
"""

_context = get_context("forkserver")
# A natgrad optimizer imports torch._dynamo, which takes each process seconds.
_context.set_forkserver_preload(
    ["torch", "torch._dynamo", "pytest", "hypothesis", "natgrad"]
)


class RankError(RuntimeError):
    """A rank failed. ``rank`` says which; the message has its traceback."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(f"rank {rank} failed:\n{message}")
        self.rank = rank


@starts_processes
def run_world(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 60,
    may_die: Collection[int] = (),
    checked: bool = True,
) -> list[Any]:
    """Call ``function(rank, *args)`` on ``world`` ranks and return their results.

    The default process group is gloo. The function and its arguments are pickled, so
    it must be at the top of a module. The first rank to fail raises RankError here and
    ends the others; after ``timeout`` seconds TimeoutError names who still runs.
    Ranks in ``may_die`` may exit without a result, which is then None. Say
    ``checked=False`` if ranks start different collectives: see `CHECKED`.
    """
    checked = CHECKED and checked and not may_die
    # The store lives here, so that it outlives whichever rank a test kills.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    task = pickle.dumps((function, args))
    ranks = [_Rank(rank, world, store.port, task, checked) for rank in range(world)]
    try:
        return _collect(ranks, time.monotonic() + timeout, may_die)
    finally:
        for rank in ranks:
            rank.end()


class _Rank:
    def __init__(
        self, rank: int, world: int, port: int, task: bytes, checked: bool
    ) -> None:
        self.rank = rank
        self.pipe, theirs = _context.Pipe(duplex=False)
        task_of_rank = (theirs, rank, world, port, task, checked)
        self.process = _context.Process(target=_main, args=task_of_rank, daemon=True)
        self.process.start()
        theirs.close()

    def result(self) -> tuple[bool, Any]:
        try:
            return pickle.loads(self.pipe.recv_bytes())
        except EOFError:
            self.process.join()
            return False, None

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _collect(ranks: list[_Rank], deadline: float, may_die: Collection[int]) -> list:
    waiting = {rank.pipe: rank for rank in ranks}
    results: list[Any] = [None] * len(ranks)
    while waiting:
        ready = connection.wait(list(waiting), max(0, deadline - time.monotonic()))
        if not ready:
            running = sorted(rank.rank for rank in waiting.values())
            raise TimeoutError(f"ranks {running} still run")
        for pipe in ready:
            rank = waiting.pop(pipe)  # type: ignore[arg-type]
            good, value = rank.result()
            if good:
                results[rank.rank] = value
            elif value is not None or rank.rank not in may_die:
                code = rank.process.exitcode
                raise RankError(rank.rank, value or f"exited with code {code}")
    return results


def _main(
    pipe: connection.Connection,
    rank: int,
    world: int,
    port: int,
    task: bytes,
    checked: bool,
) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    if checked:
        _check_collectives()
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        limit = timedelta(seconds=60)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world, timeout=limit
        )
        function, args = pickle.loads(task)
        answer = True, function(rank, *args)
    except BaseException:
        answer = False, traceback.format_exc()
    pipe.send_bytes(pickle.dumps(answer))
    pipe.close()
    if answer[0] and dist.is_initialized():
        dist.destroy_process_group()
    # A failed rank's threads may hang in gloo: leave without joining them.
    os._exit(0)


def _check_collectives() -> None:
    """Have torch check every group of this process but those of DDP."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    init = DistributedDataParallel.__init__

    def with_plain_group(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs["process_group"] = kwargs.get("process_group") or plain_group()
        init(self, *args, **kwargs)

    DistributedDataParallel.__init__ = with_plain_group


def plain_group(**options: Any) -> Any:
    """A group of all ranks that torch does not check, for DistributedDataParallel.

    torch 2.13 crashes when DDP is made on a checked group of gloo: ``DDP(nn.Linear(3,
    2))`` on two ranks ends with SIGSEGV in `Logger.set_construction_data_and_log`.
    """
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.OFF)
    try:
        return dist.new_group(**options)
    finally:
        dist.set_debug_level(level)
