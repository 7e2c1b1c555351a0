"""Benchmarks of natgrad: what a step costs, how cost grows, and on several ranks."""

import os

# Before torch is imported: its profiler announces every start and stop otherwise.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")
