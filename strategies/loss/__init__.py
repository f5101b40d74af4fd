"""The loss over the vocabulary without all of its logits.

The logits number tokens times vocabulary, and plain code holds them several times in float32: with 100,000 tokens to
choose from and a small model they are the peak of the whole step. `chunked_loss` is the plainest remedy, `fused_loss`
computes nothing twice, `cut_loss` keeps no row of logits at all; the others are the kernels of torch and of libraries
for comparison. Where vocabulary or rows are few, all of them cost time for nothing: `automatic_loss` chooses by size.
"""
