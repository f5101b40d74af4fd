"""The update: its moments, their type, where they lie, and when it happens.

AdamW in float32 keeps 8 bytes of moments beside the 8 of a parameter and its gradient, whatever the batch: these set
the peak where the model is large and the rows are few. `adam_8bit` keeps the rule and rounds the moments, `adafactor`,
`muon` and `sgd_momentum` keep fewer under another rule, `offloaded_moments` and `mapped_moments` keep them elsewhere.
`update_in_backward` is for the gradients, `accumulate` for the activations of a large batch; they exclude each other.
"""
