"""The training loop, and what any training needs."""
