"""The embedded demo pair, from its corpus to its figures."""
