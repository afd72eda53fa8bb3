"""Tables, pictures and one HTML page from runs that were written. Reads `Run` only, and never imports torch."""
