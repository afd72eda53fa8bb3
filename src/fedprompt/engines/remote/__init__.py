"""Clients on other machines: the engine, the protocol, the node and its state on disk."""
