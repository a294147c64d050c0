"""Runs stock transformers models under TP x PP x DP, to prove that a checkpoint loads and computes."""
