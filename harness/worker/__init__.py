"""One task in a process of its own: `python -m harness.worker SPEC RESULT`."""
