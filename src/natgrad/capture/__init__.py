"""A forward and a backward become raw statistics."""
