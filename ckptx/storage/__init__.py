"""Every read and write of a file."""
