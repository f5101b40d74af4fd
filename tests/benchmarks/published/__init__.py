"""Rebuild published GPU runs from what their rows say, and predict what they took on a device that is not there."""
