"""The contents of a checkpoint as data: dtypes, regions, entries, the catalog, the manifest."""
