"""The types in which the model computes, and in which its parameters are stored.

Narrower types halve the memory of what they cover, and round. What must stay wide differs: some strategies keep float32
parameters and narrow only the work, others narrow the parameters as well and limit what rounding loses.
"""
