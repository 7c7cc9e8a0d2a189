"""What depends on the device: its memory, meshes, and programs that were compiled for it."""
