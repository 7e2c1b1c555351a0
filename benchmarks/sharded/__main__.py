"""`python -m benchmarks.sharded`: see `benchmarks.sharded.step`."""

from benchmarks.sharded.step import main

if __name__ == "__main__":
    main()
