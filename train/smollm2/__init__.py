"""The draft head of SmolLM2: prompts, answers of the target, training."""
