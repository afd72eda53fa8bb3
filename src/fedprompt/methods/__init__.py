"""One file per method; the registry imports every module in this folder. `variants/` wraps any of them."""
