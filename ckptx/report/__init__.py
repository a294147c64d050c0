"""What a command has to say, as data; then as text or JSON."""
