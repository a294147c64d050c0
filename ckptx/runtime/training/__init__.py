"""A small, exact trainer on the runtime: it trains a recipe, saves, and resumes bit-exactly."""
