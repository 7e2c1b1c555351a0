"""`natgrad demo`: three tasks, each optimizer at its best rate of one small sweep."""
