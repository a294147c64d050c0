"""Build models without storage to find out facts that no table has; imports torch and transformers."""
