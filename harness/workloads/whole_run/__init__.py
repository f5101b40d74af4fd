"""What follows the steps of a run: it is evaluated, saved, and resumed from what was saved."""
