"""How tensors are laid out over a mesh of TP x PP x DP ranks: who holds which rectangle. Pure arithmetic, no torch."""
