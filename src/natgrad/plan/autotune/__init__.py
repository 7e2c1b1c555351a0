"""Predicts what a plan costs on a machine, and chooses the cheapest."""
