"""Keys and values while decoding: where they lie, and in how many bits.

Without a cache every new token would compute all earlier keys and values again; with it their memory grows with the
length of the row. The strategies reserve it up front, take it block by block, keep only a window of tokens, store fewer
bits, or move it to the host or to a file.
"""
