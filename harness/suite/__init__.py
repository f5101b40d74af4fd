"""From YAML to a plan: the groups of cases that a suite asks for."""
