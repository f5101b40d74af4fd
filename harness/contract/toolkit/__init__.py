"""Functions for authors of strategies."""
