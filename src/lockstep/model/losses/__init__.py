"""A loss as total and count, and the checks that it is a sum over samples."""
