"""How an output comes to be: staged beside its place, checked, and put there in one step."""
