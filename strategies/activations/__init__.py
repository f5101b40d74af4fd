"""What the backward pass needs of the layers: recomputed, offloaded, rebuilt, tiled."""
