"""The types in which the model computes and is stored."""
