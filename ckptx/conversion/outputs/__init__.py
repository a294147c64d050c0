"""What a conversion can write: one file for each format."""
