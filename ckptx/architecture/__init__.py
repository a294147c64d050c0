"""What ckptx knows about model classes: names, ties, precision rules."""
