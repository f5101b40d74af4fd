"""The update: its moments, their type, where they lie, and when it happens."""
