"""What comes out of a checkpoint is anybody's: how much of it is looked at, how it is parsed, and how it is printed."""
