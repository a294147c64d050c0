"""The steps of a conversion, one file each, in the order of `conversion/run_conversion.py`."""
