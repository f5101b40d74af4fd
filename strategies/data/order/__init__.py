"""In which order windows come."""
