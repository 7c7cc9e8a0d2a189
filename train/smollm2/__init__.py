"""The draft head of SmolLM2: prompts, the target's answers, training."""
