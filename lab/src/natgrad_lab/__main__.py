"""`python -m natgrad_lab` is the command `natgrad` (for torchrun -m)."""

import sys

from natgrad_lab.cli import main

if __name__ == "__main__":
    sys.exit(main())
