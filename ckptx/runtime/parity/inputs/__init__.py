"""Inputs for a model from its config alone: text, images and audio."""
