"""One function for each command; the command line and `import ckptx` call these."""
