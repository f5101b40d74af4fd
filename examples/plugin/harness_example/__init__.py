"""A strategy and an instrument for the harness, as a package of one's own."""
