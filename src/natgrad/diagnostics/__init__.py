"""What a user can look at: probes, timers, tables, sinks."""

from natgrad.diagnostics.groups import blocks_by_group, group_rows

__all__ = ["blocks_by_group", "group_rows"]
