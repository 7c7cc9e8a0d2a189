"""Devices: memory, meshes, partitioning, processes, and compiled programs."""
