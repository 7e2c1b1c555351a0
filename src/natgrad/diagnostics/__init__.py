"""What a user can look at: probes, timers, tables, sinks."""
