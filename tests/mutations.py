"""Break the library on purpose, one line at a time: does ``make quick`` notice?

``make mutations`` runs the quick tests on copies of the tree, each with one of these
changes, and prints which of them passed unnoticed. A change that no longer applies is
an error: its line was rewritten, so write it again.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
MUTATIONS: dict[str, tuple[str, str, str]] = {
    "a sign in the polar rule": (
        "rules/orthogonal.py",
        "return whiten_back(self._even_rows(",
        "return -whiten_back(self._even_rows(",
    ),
    "a wrong owner": (
        "plan/exchange.py",
        "_item(s.name, s.packed, everyone, (owners[s.name],))",
        "_item(s.name, s.packed, everyone, (0,))",
    ),
    "a dropped bias": (
        "layers/matrices.py",
        "input_moment(rows, bias=bias, size=size)",
        "input_moment(rows, bias=False, size=size)",
    ),
    "the pi-split upside down": (
        "math/inverse.py",
        "return pi * root, root / pi",
        "return root / pi, pi * root",
    ),
    "the decay of the newest estimate": (
        "factors/averages.py",
        "foreach.scale_(averages, old)",
        "foreach.scale_(averages, 1 - old)",
    ),
    "the KL clip without the learning rate": (
        "math/precondition.py",
        "bound = math.sqrt(kl_clip) / max(lr,",
        "bound = math.sqrt(kl_clip) / max(1.0,",
    ),
    "Nesterov without its look-ahead": (
        "rules/motion.py",
        "ahead = foreach.lerp(velocity, gradients, 1 - m)",
        "ahead = foreach.lerp(velocity, gradients, 0.0)",
    ),
    "micro-batches divided once": (
        "factors/averages.py",
        "undone = k * k if divided",
        "undone = k if divided",
    ),
    "an inverse that is a step late": (
        "factors/refresh.py",
        'interval = _interval_at("inverses", self.inverses, step)',
        'interval = 1 + _interval_at("inverses", self.inverses, step)',
    ),
    "a rank that is not asked whether its numbers are finite": (
        "factors/averages.py",
        "if not verdict.usable(s.spec.name):",
        "if False:",
    ),
}
QUICK = "not processes and not slow and not long"


def broken(place: Path, name: str) -> None:
    """Apply one of the changes to a copy."""
    file, old, new = MUTATIONS[name]
    path = place / "src" / "natgrad" / file
    text = path.read_text()
    assert text.count(old) == 1, f"{file} has {text.count(old)} times {old!r}"
    path.write_text(text.replace(old, new))


def noticed(name: str) -> tuple[bool, str]:
    """Whether the quick tests fail, and the first that does."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "tree"
        ignored = shutil.ignore_patterns(".*", "runs", "build", "dist", "__pycache__")
        shutil.copytree(ROOT, place, ignore=ignored)
        broken(place, name)
        paths = os.pathsep.join(str(place / p) for p in ("src", "lab/src", "."))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-m", QUICK]
        done = subprocess.run(
            [*command, "--numprocesses", "auto", "--dist", "loadgroup", "tests"],
            cwd=place,
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
        )
    failed = [x for x in done.stdout.splitlines() if x.startswith(("FAILED", "ERROR"))]
    first = failed[0].split(" - ")[0].partition(" ")[2] if failed else "-"
    return done.returncode != 0, first


def main(names: list[str]) -> int:
    """Print a row for each change; the number that passed unnoticed."""
    missed = 0
    for name in names or MUTATIONS:
        began = time.monotonic()
        found, first = noticed(name)
        missed += not found
        word = "noticed" if found else "NOT noticed"
        print(f"{name}: {word} in {time.monotonic() - began:.0f} s by {first}")
    return missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
