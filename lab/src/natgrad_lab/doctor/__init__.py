"""`natgrad doctor`: what a cluster and its backend are fit for."""
