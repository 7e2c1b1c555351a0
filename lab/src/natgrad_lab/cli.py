"""The command `natgrad`: finds the subcommand and turns user errors into messages."""

import importlib
import os
import select
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from natgrad_lab.errors import UserError


@dataclass(frozen=True)
class Command:
    """A subcommand: ``module:function``, imported only when it is used."""

    target: str
    help: str

    def __call__(self, arguments: Sequence[str]) -> int:
        module, function = self.target.split(":")
        return getattr(importlib.import_module(module), function)(arguments)


COMMANDS = {
    "train": Command(
        "natgrad_lab.train.command:main", "train by a recipe, or resume a run"
    ),
    "recipes": Command("natgrad_lab.recipes.command:main", "list the recipes"),
    "study": Command(
        "natgrad_lab.study.command:main",
        "measure up to which batch a method saves steps",
    ),
    "compare": Command("natgrad_lab.report.command:main", "show runs side by side"),
    "inspect": Command(
        "natgrad_lab.inspect.command:main", "write a page on every layer of a run"
    ),
    "data": Command("natgrad_lab.data.command:main", "download data sets"),
    "plan": Command(
        "natgrad_lab.simulate.plan_command:main", "predict memory and traffic of a run"
    ),
    "calibrate": Command(
        "natgrad_lab.simulate.calibrate:main",
        "measure this machine, for plan and simulate",
    ),
    "simulate": Command(
        "natgrad_lab.simulate.command:main", "predict the time of a step on many ranks"
    ),
    "doctor": Command("natgrad_lab.doctor.command:main", "test this cluster"),
    "demo": Command(
        "natgrad_lab.demo.command:main", "train six optimizers on three small tasks"
    ),
}


EXTRA = {
    *("PIL", "matplotlib", "numpy", "optuna", "psycopg", "pyarrow"),
    *("pytorch_optimizer", "rich", "simplejpeg", "sklearn", "tensorboard", "tyro"),
}
"""The modules that come with the lab."""


def usage() -> str:
    """The help text."""
    rows = "\n".join(f"  {name:<9} {each.help}" for name, each in COMMANDS.items())
    return (
        f"usage: natgrad COMMAND ...\n       natgrad --version\n\n{rows}\n\n"
        "`natgrad COMMAND --help` says more. With NATGRAD_DEBUG=1 an error shows "
        "its traceback."
    )


def versions() -> str:
    """What a report of a bug needs: versions, without importing any of them."""
    import platform
    from importlib import metadata

    found = {name: metadata.version(name) for name in ("natgrad", "torch")}
    known = ", ".join(f"{name} {version}" for name, version in found.items())
    return f"{known}, Python {platform.python_version()}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; the process's exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = _dispatch(given)
        sys.stdout.flush()
        return status
    except (UserError, ValueError, OSError, RuntimeError, ImportError) as error:
        if isinstance(error, BrokenPipeError) and _reader_is_gone():
            return 0
        problem = _explain(error)
        if problem is None or os.environ.get("NATGRAD_DEBUG") == "1":
            raise
        rank = os.environ.get("RANK")
        where = f" (rank {rank})" if rank is not None else ""
        print(f"natgrad: error{where}: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("natgrad: interrupted", file=sys.stderr)
        return 130


def _explain(error: Exception) -> str | None:
    """What to say instead of a traceback; None if only that says what is wrong."""
    if isinstance(error, ImportError):
        missing = (error.name or "").partition(".")[0] in EXTRA
        advice = (
            f"{error}. It comes with: pip install natgrad-lab, or in a clone of "
            "natgrad: pip install . ./lab"
        )
        return advice if missing else None
    # another process is the cause, so that a traceback here says nothing
    peer = type(error).__name__ in ("CommError", "PeerError")
    return str(error) if peer or not isinstance(error, RuntimeError) else None


def _reader_is_gone() -> bool:
    """Whether nobody reads what is printed (`natgrad ... | head`): that is no error."""
    try:
        out = sys.stdout.fileno()
    except (OSError, ValueError):  # no file at all
        return False
    poll = select.poll()
    poll.register(out, 0)
    gone = any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))
    if gone:  # or Python would write the rest at its end, and say that it failed
        os.dup2(os.open(os.devnull, os.O_WRONLY), out)
    return gone


def _dispatch(given: Sequence[str]) -> int:
    if not given or given[0] in ("-h", "--help"):
        print(usage())
        return 0
    if given[0] == "--version":
        print(versions())
        return 0
    for option, value in pairwise([*given, "-"]):
        if option.startswith("--") and (not value or option.endswith("=")):
            raise UserError(f"Invalid {option.rstrip('=')} ''. Must not be empty.")
    if given[0] not in COMMANDS:
        legal = ", ".join(COMMANDS)
        raise UserError(f"Unknown command {given[0]!r}. Must be one of {legal}.")
    return COMMANDS[given[0]](given[1:])


if __name__ == "__main__":
    sys.exit(main())
