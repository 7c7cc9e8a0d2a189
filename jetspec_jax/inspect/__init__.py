"""Looking inside: forwards, rounds one by one, near-ties, and what a checkpoint holds."""
