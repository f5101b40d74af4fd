"""Which parameters there are, and how their gradients come.

With a large vocabulary the embedding and the head outweigh the layers: 16 bytes for each number of either under AdamW.
`tied` has one matrix for both; `sparse_embedding_gradient` makes no gradient for rows that nothing has read.
"""
