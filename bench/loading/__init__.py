"""Reading a checkpoint: how long, and how much memory of host and devices."""
