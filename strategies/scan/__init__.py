"""Recurrences over time: a selective scan, an LSTM, a GRU.

The parallel form of a selective scan keeps the states of many steps at once. Stepping through time, whole or in chunks
that are recomputed, keeps fewer states and takes longer: `sequential_scan`, `chunked_scan`. An LSTM and a GRU step in
any case, and keep their gates at each step: `chunked_recurrence` recomputes them, `truncated_bptt` gives up links over
time.
"""
