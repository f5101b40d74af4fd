"""The training runs that come with the harness."""
