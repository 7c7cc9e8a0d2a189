"""A draft head for any target: its prompts, its answers, the training, a judgement, and a folder to serve."""
