"""Targets in GGUF, the format of llama.cpp: one file with weights, config, tokenizer and chat template.

`header` reads the file's metadata and where its tensors are. `config` makes a ``config.json`` of the
metadata, `tensors` gives the tensors under their published names, and `tokenizer` builds the tokenizer.
"""
