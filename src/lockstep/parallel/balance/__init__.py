"""How evenly devices are loaded, in bytes and in time, and the largest batch that fits."""
