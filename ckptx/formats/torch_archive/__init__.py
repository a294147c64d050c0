"""The zip files that `torch.save` writes, and the pickles in them."""
