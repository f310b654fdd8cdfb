"""One run as a person meets it: its folder, its events, the terminal, and a request to stop."""
