"""Conversion from HF to DCP and back, and resharding for a mesh. Read run_conversion.py, then the module of a step.

Names of a tensor, in the order of the steps; `ckptx/mapping/__init__.py` describes the naming schemes:

    stored name   name in the source checkpoint
    view name     key of `ModelView.tensors`: the stored name without prefix and wrappers
    target name   view name, or the name that `--names` gives the tensor
    output name   name in the output: the target name, or one with a prefix or wrappers
    loaded name   name that a loader looks a target tensor up by, see `NameMap.loaded_name`
"""
