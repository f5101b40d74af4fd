"""How batches are made ready: in advance, in another process, by a loader."""
