"""Models written out, so that the examples need no other package."""
