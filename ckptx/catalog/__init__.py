"""What a checkpoint holds, as data: dtypes, regions, entries, the catalog, the manifest."""
