"""Losses that need more than a local batch: all outputs, or numbers of the whole batch."""
