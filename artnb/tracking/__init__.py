"""What is kept of a run: history on disk, always."""
