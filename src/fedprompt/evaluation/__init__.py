"""What a federation is measured by."""
