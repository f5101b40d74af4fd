"""The allocator and the libraries under the framework: how soon freed memory can be used again, and what they keep.

On a CPU the other strategies are measured with an allocator that returns it to the system at once. The usual one keeps
some, so the saving of a strategy may not reach you. On a GPU torch keeps segments, and what fits into no gap of them
takes a new one. These strategies are set in the environment of the process, before it starts.
"""
