"""One whole run of a plan: its order, its worker processes, its files and locks."""
