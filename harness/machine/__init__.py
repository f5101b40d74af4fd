"""What this machine is, how much memory a process takes, and what would spoil figures."""
