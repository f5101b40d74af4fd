"""The recurrence of a selective scan over time.

The parallel form keeps the states of many steps at once. Stepping through time, whole or in chunks that are recomputed,
keeps fewer states and takes longer.
"""
