"""A small, exact trainer on the runtime: what a recipe says is trained, saved and resumed, bit for bit."""
