"""A federation across machines: folders with keys and certificates, and the commands around Flower's programs."""
