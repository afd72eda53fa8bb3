"""Settings chosen on validation images: search spaces, studies, what each method was given, and their report."""
