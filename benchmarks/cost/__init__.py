"""Step cost and state of every rule beside its public implementation."""
