"""Pure functions on tensors: no modules, no processes, no state.

Shapes, here and everywhere in natgrad. A block's gradient is a stack ``(s, m, n)``:
s independent matrices of m rows (a layer's outputs) and n columns (its inputs, the
bias last). A factor on the right is ``(s, n, n)``, on the left ``(s, m, m)``; a
diagonal one is ``(s, n)``.
"""
