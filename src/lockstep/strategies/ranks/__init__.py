"""Steps of several ranks: what they sum, and the buffers that follow the first rank."""
