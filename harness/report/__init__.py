"""Records in forms that people read."""
