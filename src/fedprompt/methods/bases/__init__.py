"""Base classes that several methods share. No method is registered here."""
