"""Exact second moments of convolutions, by autocorrelation or by patches."""
