"""Plan and execute the copy of tensor data from one catalog to another."""
