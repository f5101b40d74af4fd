"""What follows the steps of a run: its evaluation, its checkpoint, and the run that goes on from there.

A run that fits while it trains may not fit while it is evaluated, saved or resumed: all logits of an evaluation, a
second copy of the state, a second copy of the parameters. These phases are there where a shape has `evaluations`.
"""
