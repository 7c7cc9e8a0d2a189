"""Targets in GGUF, the format of llama.cpp: one file with weights, config, tokenizer and chat template.

`header` reads the metadata and the tensors' offsets. `config` converts the metadata to a ``config.json``,
`tensors` reads tensors by their published names, `vocabulary` reads tokens and finds the ends of texts, and
`tokenizer` builds the tokenizer.
"""
