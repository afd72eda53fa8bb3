"""Which client holds which images: split, partition schemes, manifest."""
