"""All reads and writes of files."""
