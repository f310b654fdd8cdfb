"""The sum check: whether a batch is the sum of its parts."""
