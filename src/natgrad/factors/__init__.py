"""Running averages of statistics, refresh policies, and damped inverses."""
