"""The update: its moments, their type, where they lie, and when it happens.

AdamW in float32 keeps 8 bytes of moments beside the 8 of a parameter and its gradient, whatever the batch: these set
the peak where the model is large and the rows are few. `adam_8bit` and `adam_4bit` keep the rule and round the moments;
`adafactor`, `adam_mini`, `lion`, `muon` and `sgd_momentum` keep fewer under another rule, `galore` and `apollo` those
of a projected gradient, `badam` those of one block at a time and `lisa` of some layers, `lomo` none, and `soap` more
than all; `offloaded_moments` and `mapped_moments` keep them elsewhere. `update_in_backward` is for the gradients, with
`clip_in_backward` where their norm is bounded; `accumulate` is for the activations of a large batch, and goes together
with a `clip_gradients` that is named after it, but not with updates in the backward pass.
"""
