"""Update rules tuned with equal budgets: `python -m benchmarks.rules`."""
