"""Two checkpoints compared: headers for `diff`, contents bit for bit for `verify`, and optimizer state."""
