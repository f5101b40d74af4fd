"""What a strategy, a workload and the harness promise each other."""
