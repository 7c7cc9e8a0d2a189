"""Documents that draft heads learn from: how they are made, stored and read."""
