"""Memory of a training step: the storages that are alive, and the reserve of a GPU for everything else."""
