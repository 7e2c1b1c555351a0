"""The protocol of a step: what happens in which order, and what all ranks agree on."""
