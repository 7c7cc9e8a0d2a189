"""Documents that models learn from: made, kept, read."""
