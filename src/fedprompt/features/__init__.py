"""Features of images without prompts: computed once, kept in memory or on disk."""
