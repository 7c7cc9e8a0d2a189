"""Training documents for draft heads: how they are made, stored and read."""
