"""The rows that workloads read: text, tokens and frames."""
