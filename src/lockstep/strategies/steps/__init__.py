"""What every strategy builds: a model with its optimizer, asked for losses and updates."""
