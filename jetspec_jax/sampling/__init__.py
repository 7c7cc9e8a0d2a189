"""How a request is sampled: its settings, and the target's choice."""
