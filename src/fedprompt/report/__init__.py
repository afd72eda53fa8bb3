"""Tables, pictures and one HTML page from stored runs. Reads only `Run`, and never imports torch."""
