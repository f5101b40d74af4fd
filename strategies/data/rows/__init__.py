"""How the rows of a corpus are read, and the type in which they are stored.

The corpus can lie in memory, in a mapped file, or on disk until a batch needs it. Narrower types and smaller
vocabularies store less of each row; whether the answer is still right is then part of the comparison.
"""
