"""How products with the weights of layers are computed: by the library, or by kernels that are written out.

They are here to be compared and not to be used: what a kernel that reads each number from memory anew loses against one
that keeps tiles of them near, and what both lose against the library.
"""
