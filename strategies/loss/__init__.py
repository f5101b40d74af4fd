"""The loss over the vocabulary without all of its logits."""
