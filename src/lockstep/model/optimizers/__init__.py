"""Optimizers: making them, what kind they are, their gradients, and their state by name."""
