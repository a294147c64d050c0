"""Layout of tensors over a mesh of TP x PP x DP ranks: the regions of each rank. Pure arithmetic, no torch."""
