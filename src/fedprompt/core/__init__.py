"""The contract of a method: roles of tensors, messages, client sampling, random streams, the registry."""
