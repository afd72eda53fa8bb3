"""Reading and writing files: bounded reads, tensor headers, atomic writes, the cache directory."""
