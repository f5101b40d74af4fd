"""The order in which windows come.

A full permutation needs an index for every window and access to any row. Cheaper shuffles mix only within a buffer or a
few chunks, or compute each position when it is needed; how well they mix is measured as a figure. Of documents
`bucketed_lengths` sorts like lengths together, and `longest_first` lets the largest batch come at once.
"""
