"""Attention: how scores are computed, which of them, and over which windows.

The scores of a layer number batch times heads times the square of the tokens, and set the peak wherever the framework
keeps them. Its fused attention keeps none, so `dense_attention` is the comparison, and `chunked_attention` the remedy
where no fused kernel fits. The others are other functions: they drop links to make time and memory grow with the tokens
and not with their square, and are worth a look from rows of some ten thousand tokens on.
"""
