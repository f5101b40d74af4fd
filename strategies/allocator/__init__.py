"""The allocator under the framework, on a CPU: how soon freed memory returns to the system.

The other strategies are measured with an allocator that returns it at once. The stock one keeps some, so the saving
of a strategy may not reach you. These strategies are set in the environment of the process, before it starts.
"""
