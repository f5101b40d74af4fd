"""Attention: how scores are made, which of them, and over which windows."""
