"""The run file: writing it, reading it, and which runs repeat each other. Free of torch."""
