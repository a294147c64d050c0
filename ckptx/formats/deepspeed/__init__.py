"""DeepSpeed checkpoints: the model states and ZeRO optimizer states that its engine saves with `torch.save`."""
