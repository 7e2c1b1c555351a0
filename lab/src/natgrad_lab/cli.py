"""The command `natgrad`: finds the subcommand and turns user errors into messages."""

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

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
    "train": Command("natgrad_lab.train.command:main", "train with a recipe"),
    "recipes": Command("natgrad_lab.recipes.command:main", "list the recipes"),
    "study": Command(
        "natgrad_lab.study.command:main", "is a method worth it at large batch?"
    ),
    "compare": Command("natgrad_lab.report.command:main", "put runs side by side"),
    "inspect": Command(
        "natgrad_lab.inspect.command:main", "a page on every layer of a run"
    ),
    "data": Command("natgrad_lab.data.command:main", "download data sets"),
    "plan": Command("natgrad_lab.simulate.plan_command:main", "memory and traffic"),
    "calibrate": Command(
        "natgrad_lab.simulate.calibrate:main", "measure this machine into a profile"
    ),
    "simulate": Command("natgrad_lab.simulate.command:main", "a step on many ranks"),
    "demo": Command("natgrad_lab.train.demo:main", "a tour on embedded data"),
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
        f"usage: natgrad COMMAND ...\n\n{rows}\n\n"
        "`natgrad COMMAND --help` says more. With NATGRAD_DEBUG=1 an error shows "
        "its traceback."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; the process's exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print(usage())
        return 0
    try:
        return _dispatch(given)
    except BrokenPipeError:
        return 0
    except (UserError, ValueError, OSError, RuntimeError, ImportError) as error:
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


def _dispatch(given: Sequence[str]) -> int:
    if given[0] not in COMMANDS:
        legal = ", ".join(COMMANDS)
        raise UserError(f"Unknown command {given[0]!r}. Must be one of {legal}.")
    return COMMANDS[given[0]](given[1:])


if __name__ == "__main__":
    sys.exit(main())
