"""What a training logs and writes down, and the page that is made of it."""
