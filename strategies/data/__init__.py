"""From rows on disk to batches on the device."""
