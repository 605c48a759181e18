"""The mathematics of the solvers, one idea a file, on plain tensors.

Every stage works on transposed arrays: a weight is ``[in, out]``, a grid ``[groups, out]``. A linear's
outputs are independent least-squares problems that share one Hessian, so the work runs over input columns one
by one with all outputs in a contiguous vector. Columns may stand in any order; ``group_of`` says which scale
serves each.
"""
