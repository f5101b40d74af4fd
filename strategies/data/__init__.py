"""From rows on disk to batches on the device.

Rows are read (`rows`), cut into windows (`windows`), put in order (`order`) and handed out in batches (`batches`). A
strategy replaces one or several of these steps; the model and the optimizer see only the batches.
"""
