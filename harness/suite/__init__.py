"""From YAML to a plan: the comparisons of cases that a suite asks for."""
