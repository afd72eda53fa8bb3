"""Optimisation variants: wrappers that apply to any method's shared tensors. One file each."""
