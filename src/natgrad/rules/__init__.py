"""How directions become updates: averages, rules and lengths."""
