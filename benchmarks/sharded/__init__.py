"""Sharded models: memory as planned, and the time of a step against AdamW's."""
