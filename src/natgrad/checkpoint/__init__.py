"""State in and out: saved, validated, gathered, sharded."""
