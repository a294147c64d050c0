"""Map tensor names between checkpoints: prefixes, wrappers, optimizer and trainer state. Does not import torch.

Terms for names, here and in the other packages:

    stored name    name in a file of the checkpoint, with prefixes and wrappers such as `_orig_mod.`
    disk name      name as published on the Hub (`--names hf`)
    model name     name in the module that transformers builds (`--names model`)
    trainer name   name of a trainer with another scheme, such as torchtitan
    source, target name in the checkpoint that is read, and in the one that is written
    index          number between dots in a name, such as that of a layer or an expert
    pattern        name with `*` for each index: `model.layers.*.mlp.up_proj.weight`
    module list    modules that differ in one index, such as the experts of a layer
    run            one application of a conversion, to the tensors that it converts together    `RunKey`
"""
