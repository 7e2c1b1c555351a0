"""Whole trainings, judged at their end: which rule is worth what, on which network."""
