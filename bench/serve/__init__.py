"""A server under load, as clients see it over HTTP: waits, paces, throughput, and what it refuses."""
