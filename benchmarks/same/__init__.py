"""Whether another commit trains to the same numbers, to the last bit."""
