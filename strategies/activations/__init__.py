"""What the backward pass needs of the layers: recomputed, offloaded, rebuilt or tiled.

Without these strategies every layer saves its activations until the backward pass undoes it, so that the peak is layers
times tokens times what one block saves; with long rows and many layers that outweighs parameters and moments. Start
with `checkpoint`, which keeps one hidden state a layer for one more forward pass; `selective_checkpoint` costs less
time and saves less, `budget_checkpoint` fills a budget. Offloading pays where a link to the host is idle, `reversible`
where depth is the trouble and another architecture will do, `tiled_feed` where the inner part of one block is the peak.
`int8_activations` recomputes nothing and rounds.
"""
