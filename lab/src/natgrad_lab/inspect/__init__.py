"""One page that shows what every layer of a run does."""
