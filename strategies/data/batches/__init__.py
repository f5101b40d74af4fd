"""How batches are made ready before the step asks for them.

Batches can be gathered in advance, by a thread or by worker processes, so that the step does not wait; every batch that
waits takes memory. The loaders of torch, Grain, Keras and Hugging Face are here as peers, used as their documentation
shows.
"""
