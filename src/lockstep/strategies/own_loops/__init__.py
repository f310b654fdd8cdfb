"""What only loops of a person's own do with a step."""
