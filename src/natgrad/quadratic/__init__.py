"""The quadratic model of the loss: damping, learning rate and momentum found by it."""
