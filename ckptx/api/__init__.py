"""Python functions of the commands that read or convert checkpoints and forecast memory; `import ckptx` exports them.

The command line calls the same functions. Those of `diff` and `robustness` are in `comparison` and `robustness_suite`.
"""
