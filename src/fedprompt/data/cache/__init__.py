"""Files of the cache: rows with checksums, decoded pixels, prefetching, fingerprints."""
